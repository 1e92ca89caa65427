"""Little World: its grammar, its stories and the checker of coherence."""

import itertools
import math
import random
import re
import string
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsd.config import MdsdError
from mdsd.training.corpus import (
    Level,
    Story,
    check_story,
    entropy_per_token,
    generate_stories,
    load_plots,
    resource,
)
from mdsd.training.grammar import (
    Choose,
    Fill,
    Node,
    Place,
    Plot,
    Say,
    free_words,
    make_plot,
    make_word,
    read,
    read_words,
    tell,
)

# A change of these texts makes every data set prepared before another one.
EASY_1 = (
    "One windy day, Sam was in the yard with a yellow bell. It was new. Then Sam lost "
    'the yellow bell. He looked and looked. He was very sad. "Have you seen my yellow bell?" '
    'Sam asked Tom. Tom went to look behind a log. The yellow bell was there! "Thank you, '
    'Tom!" said Sam. Then they ate an apple and went home.'
)
RICH_1 = (
    'Sam\'s aunt gave him a tiny brown seed. "There is a poppy inside," she said, "but '
    'it needs time." Sam planted the seed in a pink pot, gave it a drink a'
)

LEVELS: tuple[Level, ...] = ("easy", "rich")
each_level = pytest.mark.parametrize("level", LEVELS)


def take(level: Level, count: int, seed: int = 0) -> list[Story]:
    return list(itertools.islice(generate_stories(level, seed), count))


@pytest.fixture(scope="module")
def ten_thousand() -> dict[Level, list[Story]]:
    return {level: take(level, 10_000) for level in LEVELS}


# The grammar.


def tiny_plot(story: str) -> Plot:
    slots = {
        "hero": read_words("word | he\nTom | he\nMia | she"),
        "friend": (),
        "thing": read_words(["ball", "apple"]),
    }
    slots["friend"] = slots["hero"]
    return make_plot("tiny", story, slots, {"end": "All was well.|The end."})


TINY = tiny_plot(
    """
    {hero} had {thing.a}. [{hero.He} liked it|It was [old|new]].
    ? {friend} saw {hero.him}.

    {Thing} or not, <end>
    """
)


def tellings(
    plot: Plot, node: Node | None, bound: dict, text: str, nats: float
) -> Iterator[tuple[str, float]]:
    """Enumerate all stories of a plot: a slow, independent description of what `tell` draws."""
    if node is None:
        yield text, nats
    elif isinstance(node, Say):
        yield from tellings(plot, node.then, bound, text + node.text, nats)
    elif isinstance(node, Choose):
        for option in node.options:
            yield from tellings(plot, option, bound, text, nats + math.log(len(node.options)))
    else:
        known = bound.get(node.slot)
        words = [known] if known else free_words(plot, node.slot, bound)
        for word in words:
            told = text + word.forms[node.form]
            cost = math.log(len(words))
            yield from tellings(plot, node.then, bound | {node.slot: word}, told, nats + cost)


def test_all_stories_of_a_small_plot_have_their_probability():
    stories = list(tellings(TINY, TINY.start, {}, "", 0.0))
    # 2 heroes, 2 things, 3 remarks, with or without the only other child, 2 ends
    assert len({text for text, _ in stories}) == len(stories) == 2 * 2 * 3 * 2 * 2
    assert sum(math.exp(-nats) for _, nats in stories) == pytest.approx(1)
    for text, nats in stories:
        complete, _ = read(TINY, " ".join(text.split()), Place(0, TINY.start, {}, 0.0))
        assert [place.nats for place in complete] == [pytest.approx(nats)]


def test_stories_come_as_often_as_their_nats_say():
    rng = random.Random(0)
    expected = dict(tellings(TINY, TINY.start, {}, "", 0.0))
    counts: dict[str, int] = {}
    for _ in range(48_000):
        text = "".join(piece for piece, _ in tell(TINY, rng))
        counts[text] = counts.get(text, 0) + 1
    chi2 = sum(
        (counts[text] - 48_000 * math.exp(-nats)) ** 2 / (48_000 * math.exp(-nats))
        for text, nats in expected.items()
    )
    assert chi2 < 90  # 47 degrees of freedom: 1 in 7,000 by chance


def test_an_example_is_told_with_articles_pronouns_and_paragraphs():
    texts = {text for text, _ in tellings(TINY, TINY.start, {}, "", 0.0)}
    assert "Mia had an apple. She liked it. Tom saw her.\n\nApple or not, The end." in texts
    assert "Tom had a ball. It was old.\n\nBall or not, All was well." in texts


def test_forms_of_words():
    forms = make_word({"word": "orange", "he": "she"}).forms
    assert (forms["a"], forms["A"], forms["His"]) == ("an orange", "An orange", "Her")
    assert make_word({"word": "hour", "a": "an hour"}).forms["a"] == "an hour"


def test_two_tellings_of_one_text_are_both_found():
    plot = tiny_plot("[Tom|{hero}] slept.")
    complete, _ = read(plot, "Tom slept.", Place(0, plot.start, {}, 0.0))
    total = sum(math.exp(-place.nats) for place in complete)
    assert total == pytest.approx(1 / 2 + 1 / 4)


# The data files.


def nodes(start: Node | None) -> Iterator[Node]:
    stack, seen = [start], set()
    while stack:
        node = stack.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        stack += node.options if isinstance(node, Choose) else [node.then]


@each_level
def test_every_slot_and_form_exists(level: Level):
    for plot in load_plots(level):
        for node in nodes(plot.start):
            if isinstance(node, Fill):
                assert plot.slots[node.slot], (plot.name, node)
                assert all(node.form in word.forms for word in plot.slots[node.slot]), node


@each_level
def test_texts_are_cleanly_set(level: Level, ten_thousand: dict[Level, list[Story]]):
    for story in ten_thousand[level]:
        text = story.text
        assert text == text.strip(), text
        assert "  " not in text, text
        assert re.search(r"[.!?][\"']?$", text), text
        assert not re.search(r"[\[\]{}<>|]|\s[.,!?]|(?<!\.)\.\.(?!\.)|,,|[!?]\.", text), text
        assert text.count('"') % 2 == 0, text
        assert not re.search(r"\ba [aeiou]|\ban (?!hour)[^aeiou\W]", text, re.I), text
        assert not re.search(r"(?<!\.\.)[.!?] \"?[a-z]", text), text


def test_levels_have_the_size_they_promise(ten_thousand: dict[Level, list[Story]]):
    vocabulary = {
        level: {w for s in stories for w in re.findall(r"[a-z]+(?:'[a-z]+)?", s.text.lower())}
        for level, stories in ten_thousand.items()
    }
    assert 150 <= len(vocabulary["easy"]) <= 300
    assert len(vocabulary["rich"]) >= 1_500
    assert len({story.plot for story in ten_thousand["rich"]}) >= 30
    assert len({story.plot for story in ten_thousand["easy"]}) >= 5
    easy = load_plots("easy")[0].slots
    assert len(easy["hero"]) == 8
    assert len(easy["thing"]) == 10


def test_a_missing_resource_is_explained():
    with pytest.raises(MdsdError, match="no such file"):
        resource("no such file")
    assert resource("little_world").is_dir()


# The stream.


@each_level
def test_ten_thousand_stories_are_distinct(level: Level, ten_thousand: dict[Level, list[Story]]):
    assert len({story.text for story in ten_thousand[level]}) == 10_000


@each_level
def test_a_seed_fixes_the_stories(level: Level):
    assert take(level, 50, seed=7) == take(level, 50, seed=7)
    assert not {s.text for s in take(level, 50, seed=7)} & {s.text for s in take(level, 50, seed=8)}


def test_stories_are_the_same_on_every_platform():
    assert take("easy", 1, seed=1)[0].text == EASY_1
    assert take("rich", 1, seed=1)[0].text.startswith(RICH_1)


@each_level
def test_generation_is_fast(level: Level):
    load_plots(level)
    start = time.process_time()
    take(level, 2_000)
    assert 2_000 / (time.process_time() - start) > 2_000


def test_entropy_per_token_is_mean_surprise_over_mean_length():
    stories = [Story("a b c", 2.0, "p"), Story("a", 4.0, "p")]
    assert entropy_per_token(stories, str.split) == pytest.approx((2 + 4) / (4 + 2))


# The checker.


@each_level
def test_every_story_is_coherent_and_its_nats_are_read_back(
    level: Level, ten_thousand: dict[Level, list[Story]]
):
    for story in ten_thousand[level]:
        verdict = check_story(story.text, level)
        assert verdict.coherent, story
        assert not verdict.problems, story
        assert verdict.plot == story.plot
        assert verdict.nats == pytest.approx(story.nats, rel=1e-9), story


@each_level
def test_white_space_does_not_matter(level: Level):
    for story in take(level, 20):
        assert check_story("\n" + story.text.replace(" ", "\n") + "  ", level).coherent


@each_level
def test_checking_is_fast(level: Level):
    stories = take(level, 500)
    start = time.process_time()
    assert all(check_story(story.text, level).coherent for story in stories)
    assert 500 / (time.process_time() - start) > 500


def swap(text: str, old: str, new: str, rng: random.Random) -> str | None:
    """Exchange one occurrence of a word that occurs at least twice."""
    found = list(re.finditer(rf"\b{re.escape(old)}\b", text))
    if len(found) < 2:
        return None
    place = rng.choice(found)
    return text[: place.start()] + new + text[place.end() :]


def swap_slot(*slots: str) -> Callable[..., str | None]:
    """Make a mutation that exchanges one mention of a word in one of these slots."""

    def mutate(story: Story, level: Level, other: Story, rng: random.Random) -> str | None:
        domains = {k: v for k, v in load_plots(level)[0].slots.items() if k in slots}
        for slot in domains:
            words = [word.forms["word"] for word in domains[slot]]
            here = [word for word in words if re.search(rf"\b{re.escape(word)}\b", story.text)]
            absent = [word for word in words if word not in here]
            if here and (text := swap(story.text, rng.choice(here), rng.choice(absent), rng)):
                return text
        return None

    return mutate


def swap_pronoun(story: Story, level: Level, other: Story, rng: random.Random) -> str | None:
    pairs = {"he": "she", "He": "She", "his": "her", "His": "Her", "him": "her"}
    pairs |= {"she": "he", "She": "He", "her": "his", "Her": "His"}
    found = list(re.finditer(r"\b(?:[Ss]?he|[Hh]is|[Hh]im|[Hh]er)\b", story.text))
    if not found:
        return None
    place = rng.choice(found)
    return story.text[: place.start()] + pairs[place[0]] + story.text[place.end() :]


def sentences(text: str) -> list[str]:
    return [s.strip() for s in re.findall(r".+?(?<!\bMr)(?<!\bMrs)[.!?]+\"?(?:\s+|$)", text, re.S)]


def foreign_ending(story: Story, level: Level, other: Story, rng: random.Random) -> str:
    return " ".join(sentences(story.text)[:-3] + sentences(other.text)[-3:])


def drop_sentence(story: Story, level: Level, other: Story, rng: random.Random) -> str:
    parts = sentences(story.text)
    del parts[rng.randrange(1, len(parts) - 1)]
    return " ".join(parts)


def shuffle_sentences(story: Story, level: Level, other: Story, rng: random.Random) -> str:
    parts = sentences(story.text)
    i = rng.randrange(len(parts) - 1)
    parts[i], parts[i + 1] = parts[i + 1], parts[i]
    return " ".join(parts)


def truncate(story: Story, level: Level, other: Story, rng: random.Random) -> str:
    return story.text[: rng.randrange(1, len(story.text) - 1)]


def cut_at_sentence(story: Story, level: Level, other: Story, rng: random.Random) -> str:
    parts = sentences(story.text)
    return " ".join(parts[: rng.randrange(1, len(parts) - 1)])


def glue(story: Story, level: Level, other: Story, rng: random.Random) -> str:
    return story.text + " " + other.text


def gibberish(story: Story, level: Level, other: Story, rng: random.Random) -> str:
    words = story.text.split()
    rng.shuffle(words)
    return " ".join(words)


MUTATIONS: dict[str, Callable[[Story, Level, Story, random.Random], str | None]] = {
    "name": swap_slot("hero"),
    "thing": swap_slot(
        "thing", "toy", "treat", "flower", "instrument", "crockery", "vehicle", "bird", "small"
    ),
    "color": swap_slot("color"),
    "pronoun": swap_pronoun,
    "ending of another plot": foreign_ending,
    "sentence dropped": drop_sentence,
    "sentences exchanged": shuffle_sentences,
    "cut inside": truncate,
    "cut at a sentence": cut_at_sentence,
    "two stories": glue,
    "words shuffled": gibberish,
}


@each_level
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_corrupted_stories_are_rejected(level: Level, mutation: str):
    rng = random.Random(0)
    stories = take(level, 400, seed=2)
    caught = tried = 0
    for story, other in itertools.pairwise(stories):
        if story.plot == other.plot:
            continue
        text = MUTATIONS[mutation](story, level, other, rng)
        if text is None or " ".join(text.split()) == " ".join(story.text.split()):
            continue
        verdict = check_story(text, level)
        assert verdict.coherent != bool(verdict.problems)
        tried += 1
        caught += not verdict.coherent
    assert tried > 50
    assert caught / tried >= 0.95


@pytest.mark.parametrize("text", ["", " \n", ".", "Once upon a time", "a" * 10_000, "\0\ud800"])
@each_level
def test_no_story_is_incoherent(level: Level, text: str):
    verdict = check_story(text, level)
    assert not verdict.coherent
    assert verdict.problems
    assert verdict.nats == math.inf


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet=string.printable, max_size=300))
def test_any_text_gets_a_verdict(text: str):
    for level in LEVELS:
        assert not check_story(text, level).coherent


def test_the_verdict_names_the_mistake():
    story = next(s for s in take("easy", 50) if s.plot == "lost and found")
    hero = re.search(r"day, (\w+) was", story.text)[1]
    stranger = "Max" if hero != "Max" else "Ben"
    changed = check_story(story.text.replace(f"Then {hero}", f"Then {stranger}"), "easy")
    assert f"'{stranger}'" in changed.problems[0]
    assert f"'{hero}'" in changed.problems[0]
    cut = check_story(story.text[: story.text.index('"Have')], "easy")
    assert "breaks off" in cut.problems[0]
    longer = check_story(story.text + " The end.", "easy")
    assert "goes on" in longer.problems[0]
    first, *rest = sentences(story.text)
    dropped = check_story(" ".join([first, *rest[2:]]), "easy")
    assert "something is missing" in dropped.problems[1]
