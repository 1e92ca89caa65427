"""mini DeepSeek: a small DeepSeek-V3 to build, train and question, chapter by chapter.

`from mdsd import MiniDeepSeek, preset` takes what most programs need from here; the modules named
below hold the rest.
"""

import os
import signal
import sys
from pathlib import Path

# While the program `mdsd` starts, Ctrl-C ends it without a traceback, until mdsd.cli takes over.
_is_program = Path(sys.argv[0]).stem == "mdsd" or "-m mdsd" in " ".join(sys.orig_argv[:4])
if _is_program and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# On Linux torch's threads spin while they wait for each other, so long that on a processor which
# other programs use too a step takes ten times as long. It has to be said before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from mdsd.config import PRESETS, ConfigError, MdsdError, ModelConfig, preset
from mdsd.counting import count_parameters
from mdsd.model.context import stretch
from mdsd.model.fp8 import convert_to_fp8
from mdsd.model.generate import Sampling, generate, sample_stories, tell_story
from mdsd.model.hub import save_pretrained
from mdsd.model.mla import LatentCache
from mdsd.model.published import from_pretrained
from mdsd.model.speculative import speculate
from mdsd.model.transformer import Losses, MiniDeepSeek
from mdsd.training.checkpoint import load_run
from mdsd.training.corpus import check_story, generate_stories
from mdsd.training.data import TokenData, batch
from mdsd.training.loop import train
from mdsd.training.prepare import PrepareConfig, prepare
from mdsd.training.step import TrainConfig
from mdsd.training.tokenizer import Tokenizer, gpt2_tokenizer

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "ConfigError",
    "LatentCache",
    "Losses",
    "MdsdError",
    "MiniDeepSeek",
    "ModelConfig",
    "PrepareConfig",
    "Sampling",
    "TokenData",
    "Tokenizer",
    "TrainConfig",
    "batch",
    "check_story",
    "convert_to_fp8",
    "count_parameters",
    "from_pretrained",
    "generate",
    "generate_stories",
    "gpt2_tokenizer",
    "load_run",
    "prepare",
    "preset",
    "sample_stories",
    "save_pretrained",
    "speculate",
    "stretch",
    "tell_story",
    "train",
]
