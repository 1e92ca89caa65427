"""The front door: `mdsd prepare`, `train`, `plot`, `sample`, `evaluate`, `export` and others.

The options are the fields of the configuration classes; a user's mistake ends in one line.
"""

from __future__ import annotations

import io
import os
import shlex
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, TextIO

import torch
import tyro

from mdsd.config import PRESETS, ConfigError, MdsdError, ModelConfig, preset
from mdsd.counting import count_parameters
from mdsd.model.generate import Sampling, sample_stories, story_loss, tell_story
from mdsd.model.hub import HubError, save_pretrained
from mdsd.model.published import from_pretrained, read_config, save_run
from mdsd.model.speculative import Tally, speculate_story
from mdsd.training.benchmark import BenchConfig, run_bench, table
from mdsd.training.checkpoint import CheckpointWarning, load_run
from mdsd.training.corpus import Level, check_story, entropy_per_token, generate_stories
from mdsd.training.data import TokenData
from mdsd.training.loop import Interrupted, train
from mdsd.training.pictures import compare_runs, save_figure
from mdsd.training.memory import MemoryConfig, memory_state, memory_step
from mdsd.training.portable import tokenizer_of
from mdsd.training.prepare import PrepareConfig, prepare

Flat = tyro.conf.arg(name="")  # a nested class whose options carry no prefix
Model = Annotated[ModelConfig, tyro.conf.AvoidSubcommands]
LARGEST = 10**10  # parameters
FRESH = 1_000_003  # a seed of stories that nobody prepares by accident


def say(*lines: str) -> None:
    """Tell the user something; standard output is for stories alone."""
    print(*lines, sep="\n", file=sys.stderr, flush=True)


def shown(path: Path) -> str:
    """The path as it can be typed in a command."""
    return f'"{path}"' if " " in str(path) else str(path)


def prepare_command(config: Annotated[PrepareConfig, Flat]) -> None:
    """Turn stories into token files that training reads.

    For example:
      mdsd prepare --source bundled --out prepared/little-world
    """
    meta = prepare(config)
    train_split, val = meta["splits"]["train"], meta["splits"]["val"]
    say(
        f"{config.out}: {train_split['stories']:,} stories, {train_split['tokens']:,} tokens to "
        f"train on, {val['tokens']:,} to validate, a vocabulary of {meta['vocab_size']:,}."
    )


def require_at_least(config: object, **least: int) -> None:
    """Raise a `ConfigError` that names the field of `config` which is less than it may be."""
    for name, value in least.items():
        if getattr(config, name) < value:
            raise ConfigError(f"{name} is {getattr(config, name)}; it must be at least {value}")


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """What to tell, and how."""

    run: Path
    """Folder that `mdsd train` wrote."""
    prompt: str = "One day,"
    """How the story begins."""
    max_new_tokens: int = 256
    """Stop here if the story has not ended before."""
    speculative: bool = False
    """Let the MTP modules draft and the model check; say what that saved."""
    ema: bool = False
    """Tell it with the averages of the weights that `mdsd train --ema-decay` kept."""
    device: str = "cpu"
    """cpu, cuda or mps."""

    def __post_init__(self) -> None:
        require_at_least(self, max_new_tokens=0)


def sample_command(
    config: Annotated[SampleConfig, Flat], sampling: Annotated[Sampling, Flat]
) -> None:
    """Tell a story on standard output.

    For example:
      mdsd sample --run runs/tiny --prompt "One day," --temperature 0.8 --seed 1
    """
    model, tokenizer = load_run(config.run, config.device, config.ema)
    story, tally = (model, tokenizer, config.prompt, config.max_new_tokens, sampling), Tally()
    for piece in speculate_story(*story, tally) if config.speculative else tell_story(*story):
        print(piece, end="", flush=True)
    print()
    if tally.drafted:
        say(
            f"{tally.passes} passes of the main model gave {tally.tokens_per_pass():.2f} tokens "
            f"each: of {tally.drafted[1]} second tokens that the first MTP module drafted, "
            f"{tally.acceptance():.0%} were accepted."
        )


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """How many stories to tell and check."""

    run: Path
    """Folder that `mdsd train` wrote."""
    level: Level = "easy"
    """Level of the bundled stories that the model learned from."""
    stories: int = 200
    """Stories to tell."""
    show: int = 3
    """Stories to print, with what is wrong in them."""
    max_new_tokens: int = 256
    """A story that has not ended by then is cut off, and so not coherent."""
    device: str = "cpu"
    """cpu, cuda or mps."""

    def __post_init__(self) -> None:
        require_at_least(self, stories=1, show=0, max_new_tokens=0)


def evaluate_command(
    config: Annotated[EvaluateConfig, Flat], sampling: Annotated[Sampling, Flat]
) -> None:
    """Tell stories and count the coherent ones (for models of the bundled corpus).

    For example:
      mdsd evaluate --run runs/tiny --stories 200 --seed 1
    """
    model, tokenizer = load_run(config.run, config.device)
    stories = sample_stories(
        model, tokenizer, config.stories, sampling, max_new_tokens=config.max_new_tokens
    )
    verdicts = [check_story(story, config.level) for story in stories]
    for story, verdict in list(zip(stories, verdicts, strict=True))[: config.show]:
        note = "coherent" if verdict.coherent else f"not coherent: {verdict.problems[0]}"
        print(story, f"({note})", "", sep="\n")
    fresh = list(islice(generate_stories(config.level, seed=FRESH), 200))
    loss = story_loss(model, tokenizer, [story.text for story in fresh])
    say(
        f"{sum(verdict.coherent for verdict in verdicts)} of {len(stories)} stories are coherent "
        f"(temperature {sampling.temperature}, seed {sampling.seed}).",
        f"Loss on 200 stories it has not seen: {loss:.3f} nats a token; the corpus's entropy, "
        f"which no model beats, is {entropy_per_token(fresh, tokenizer.encode):.3f}.",
        f"The loss curve is {config.run / 'loss.png'}. What to do next:",
        f'  mdsd sample --run {shown(config.run)} --prompt "One day, Tom"',
        "  make lab      to read how it works, chapter by chapter",
    )


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Which model to write, and where."""

    run: Path
    """Folder that `mdsd train` wrote; its best checkpoint is exported."""
    out: Path
    """New folder for config.json, the weights and the tokenizer."""


def export_command(config: Annotated[ExportConfig, Flat]) -> None:
    """Write a model in the DeepSeek-V3 format, which transformers loads.

    For example:
      mdsd export --run runs/tiny --out hf/tiny
    """
    model, tokenizer = load_run(config.run)
    save_pretrained(model, config.out, tokenizer)
    if tokenizer.kept_ids is not None:
        say(
            "The vocabulary is cut, and transformers can only come close to how mdsd splits text: "
            "rare words may become other tokens (the chapter on portable tokens counts them)."
        )
    say(
        f"{config.out} is ready. What to do next, where transformers is installed:",
        '  python -c "from transformers import pipeline; '
        f"print(pipeline('text-generation', {str(config.out)!r})('One day,')[0])\"",
    )


@dataclass(frozen=True, kw_only=True)
class ImportConfig:
    """Which model to read, and where its run folder goes."""

    folder: Path
    """Folder in the DeepSeek-V3 format with mdsd's tokenizer, as `mdsd export` writes it."""
    out: Path
    """New run folder, for `mdsd sample` and `mdsd evaluate`."""


def import_command(config: Annotated[ImportConfig, Flat]) -> None:
    """Read a model in the DeepSeek-V3 format into a run folder.

    For example:
      mdsd import --folder hf/tiny --out runs/imported
    """
    read_config(config.folder)  # is it a model's folder at all?
    tokenizer = tokenizer_of(config.folder)
    if tokenizer is None:
        raise HubError(
            f"{config.folder} holds no tokenizer_meta.json, mdsd's own tokenizer, without which "
            "a run can tell no story: if the model was exported by mdsd, copy the file from there. "
            "Any model alone can be read in Python, by mdsd.model.published.from_pretrained"
        )
    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("always")
        model = from_pretrained(config.folder)
    for remark in remarks:
        say(f"Note: {remark.message}.")
    if tokenizer.vocab_size > model.config.vocab_size:
        raise HubError(
            f"{config.folder / 'tokenizer_meta.json'} has {tokenizer.vocab_size:,} tokens and the "
            f"model {model.config.vocab_size:,}: copy the model's own file there"
        )
    save_run(model, tokenizer, config.out)
    say(
        f"{config.out} is ready. What to do next:",
        f'  mdsd sample --run {shown(config.out)} --prompt "One day,"',
    )


def bench_command(config: Annotated[BenchConfig, Flat]) -> None:
    """Measure speed and memory beside transformers and a dense GPT, as a table of ratios.

    For example:
      mdsd bench --only small decode --rounds 5 --threads 2
    """
    print(table(run_bench(config)))
    say(f"Every single time is in {config.out}.")


@dataclass(frozen=True, kw_only=True)
class PlotConfig:
    """Which runs to compare, and where to draw them."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders that `mdsd train` wrote."""
    out: Path = Path("runs.png")
    """Picture to write; its ending chooses the format."""


def plot_command(config: Annotated[PlotConfig, Flat]) -> None:
    """Compare runs in one picture: losses, gradients, balance, speed.

    For example:
      mdsd plot runs/tiny runs/other --out runs.png
    """
    save_figure(compare_runs(config.runs), config.out)
    say(f"{config.out} is drawn.")


def check_size(model: ModelConfig) -> None:
    """Raise a `ConfigError` if the model is one that only a cluster could train."""
    total = count_parameters(model).total
    if total > LARGEST:  # weights, gradients and AdamW's two moments in float32: 16 bytes each
        raise ConfigError(
            f"a model of {total / 1e9:.0f} billion parameters needs {16 * total / 2**30:,.0f} GiB "
            "to train; choose --preset tiny or mini"
        )


def train_command_for(default: ModelConfig) -> Callable[..., None]:
    """The train command with the numbers of `default` as the model's defaults."""

    def train_command(config: Annotated[MemoryConfig, Flat], model: Model = default) -> None:
        """Train a model on a prepared data set.

        For example:
          mdsd train --data prepared/little-world --preset tiny --out runs/tiny

        Numbers of the model that you do not give are the preset's or the data's.
        """
        if model.vocab_size == default.vocab_size:  # none was asked for
            model = replace(model, vocab_size=TokenData(config.data).meta["vocab_size"])
        check_size(model)
        train(config, model, step=memory_step, state=memory_state)
        say(
            f"Trained. The loss curve is {config.out / 'loss.png'}. What to do next:",
            f'  mdsd sample --run {shown(config.out)} --prompt "One day,"',
        )

    return train_command


def preset_in(arguments: list[str]) -> ModelConfig:
    """The model that `--preset` names: its numbers are the defaults of the model's options."""
    chosen = PRESETS["tiny"]
    for number, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name == "--preset":
            chosen = preset(value or "".join(arguments[number + 1 : number + 2]))
    return chosen


def resuming(arguments: list[str]) -> str:
    """The command that goes on with the training that these arguments began."""
    program = "python -m mdsd" if Path(sys.argv[0]).stem == "__main__" else "mdsd"
    words = [word for word in arguments if word not in ("--resume", "--no-resume")]
    words.append("--resume")
    return f"{program} {subprocess.list2cmdline(words) if os.name == 'nt' else shlex.join(words)}"


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Say what is wrong with a checkpoint in one line, without the place in the code."""

    def remark(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, CheckpointWarning):
            say(f"Note: {message}.")
        else:
            shown_before(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        shown_before, warnings.showwarning = warnings.showwarning, remark
        yield


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory is full; on a CPU torch says so by a plain RuntimeError."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or "can't allocate memory" in str(error)


def run_command(arguments: list[str]) -> None:
    """Do what the command line asks for."""
    tyro.extras.subcommand_cli_from_dict(
        {
            "prepare": prepare_command,
            "train": train_command_for(preset_in(arguments)),
            "plot": plot_command,
            "sample": sample_command,
            "evaluate": evaluate_command,
            "export": export_command,
            "import": import_command,
            "bench": bench_command,
        },
        prog="mdsd",
        description="Build, train and question a mini DeepSeek-V3.",
        args=arguments,
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    The exit status is 0; 1 after a mistake that it has explained, 2 after options that it does not
    know; 130 after Ctrl-C and 143 after SIGTERM, also when a training was saved.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # see mdsd/__init__.py
        signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a Windows pipe has no λ: let it be "?"
            stream.reconfigure(errors="replace")
    try:
        with one_line_warnings():
            run_command(arguments)
    except BrokenPipeError:  # whoever read our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Interrupted as error:
        say(f"mdsd: {error}:", f"  {resuming(arguments)}")
        return 128 + error.signal
    except (MdsdError, OSError) as error:  # what the library refuses, and a full or absent disk
        say(f"mdsd: {error}")
        return 1
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        say("mdsd: memory is full: lower --batch-size (or split it: --micro-batches) or --seq-len")
        return 1
    except KeyboardInterrupt:
        say("mdsd: stopped")
        return 130
    return 0
