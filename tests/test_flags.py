"""Flags: common/flags.py. Read it after step 1."""

from dataclasses import dataclass

import pytest

from common import UserError
from common.flags import AT_LEAST_2, flag, parse

cases = pytest.mark.parametrize
RULES = {"adamw": 1, "sgd": 2}


@dataclass
class Base:
    """Flags of a trainer."""

    steps: int = flag(200, "how many steps, at 100%", least=1)
    lr: float = flag(0.1, "learning rate")
    warmup: int = flag(20, "steps of warm-up")
    optimizer: str = flag("adamw", "update rule", RULES)
    tp: int = flag(1, "ranks that share a matrix", least=1)
    out: str = flag("", "directory")


@dataclass
class Config(Base):
    """More flags."""

    lr: float = flag(0.2, "learning rate")  # another default
    sp: bool = flag(True, "shard tokens", needs={"tp": AT_LEAST_2})
    bucket_mb: float = flag(1.0, "size of a bucket", needs={"optimizer": ["sgd"]})
    overlap: bool = flag(False, "hide messages", needs={"sp": [True], "of_another_step": ["any"]})


GIVEN = [
    ([], Config()),
    (["--steps=2", "--lr", "0.5", "--warmup=0"], Config(steps=2, lr=0.5, warmup=0)),
    (["--optimizer=adamw", "--out=a b"], Config(out="a b")),
    (["--tp=2", "--no-sp"], Config(tp=2, sp=False)),
    (["--optimizer=sgd", "--bucket-mb=0"], Config(optimizer="sgd", bucket_mb=0.0)),
    (["--overlap"], Config(overlap=True)),
]


@cases("words, expected", GIVEN)
def test_words_become_a_config(words, expected):
    """Each field is a flag; - stands for _ in its name, and --no- before it for False. A need for a
    flag that Config lacks, as of --overlap, is ignored.
    """
    found = parse(Config, words)
    assert found == expected, found


REFUSED = [
    ("--step=3", "unrecognized arguments: --step=3"),  # no abbreviations
    ("--steps=many", "argument --steps: invalid int value: 'many'"),
    ("--steps=1.5", "argument --steps: invalid int value: '1.5'"),
    ("--steps=0", "--steps is 0: it must be at least 1"),
    ("--warmup=-1", "--warmup is -1: it must be at least 0"),
    ("--lr=-0.1", "--lr is -0.1: it must be at least 0"),
    ("--lr=nan", "--lr is nan: it must be finite"),
    ("--lr=inf", "--lr is inf: it must be finite"),
    ("--optimizer=adam", "--optimizer adam: choose from adamw, sgd"),
    ("--bucket-mb=2", "--bucket-mb has no effect without --optimizer sgd: leave it out"),
    ("--no-sp", "--no-sp has no effect without --tp 2 or more: leave it out"),
    ("--tp=2 --no-sp --overlap", "--overlap has no effect without --sp: leave it out"),
]


@cases("words, text", REFUSED)
def test_a_wrong_flag_is_named(words, text):
    """The error names the wrong flag, and says what is wrong with it. (Those of argparse begin with
    `argument` or `unrecognized arguments`.)
    """
    with pytest.raises(UserError) as error:
        parse(Config, words.split())
    assert str(error.value).startswith(text), error.value


def test_help_lists_flags_by_class(capsys):
    """A class's own flags come before those of its bases, with their defaults and values."""
    with pytest.raises(SystemExit):
        parse(Config, ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    expected = ["More flags", "learning rate (default: 0.2)", "--sp, --no-sp"]
    expected += ["Flags of a trainer", "how many steps, at 100% (default: 200)"]
    expected += ["{adamw,sgd} update rule"]
    positions = [text.find(part) for part in expected]
    assert positions == sorted(positions) and -1 not in positions, (positions, text)
