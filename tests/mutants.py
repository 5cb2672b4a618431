"""Mutants: one token of a file of variants/ is changed at random, and the tests that matter for this file are run.

    python tests/mutants.py 30 0              draw 30 with seed 0; a line for each: noticed by which test, or by none
    python tests/mutants.py 30 0 4 17         of those only the fifth and the eighteenth

A mutant changes a number, an operator, a comparison, two arguments' order, or leaves out a call. Each is made in a copy
of the project. What `WORDS` says of its file picks tests by their ids; they run until one fails, or 90 seconds. First
the right file must pass them all. tests/test_faults.py is left out: it compares texts.
"""

import ast
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SECONDS = 90  # then a run hangs
FILES = "rules experts variants laws schedules seam model flags gpu plan labs dry_run layouts"  # in this order
CP = "context_parallel zigzag within_a_document"
WORDS = {  # words in the ids of tests that a file matters for
    "adafactor": "optimizer=adafactor wrote[adafactor adafactor",
    "balance_bias": "balance=bias biases bias_follows definition",
    "block_overlap": "tp_overlap behind_matrices test_tensor_parallel",
    "chunked_loss": "loss_chunk logits_of_one_chunk n5",
    "compiled": "compile=True one_graph",
    "compress": "step02-3-bucket_mb=0.001-compress zero=0-compress zero=1-compress zero=2-compress owed top-k refuses",
    "compress_activations": "compress_activations rounds_to int8 test_tensor_parallel",
    "cp_allgather": "cp_mode=allgather [allgather 4-allgather",
    "cp_balanced": "cp_mode=balanced balanced refuses",
    "cp_ring": "cp_mode=ring [ring 2-ring zigzag refuses",
    "cp_usp": "cp_mode=usp crossed refuses",
    "cp_ulysses": "cp_mode=ulysses 4-ulysses refuses",
    "documents": "documents document whole_sequences n4 refuses",
    "dualpipe": "dualpipe test_every_size refuses",
    "elementwise": "recompute=elementwise saved n8",
    "expert_presets": "presets",
    "ep_overlap": "ep_overlap message_of_experts refuses",
    "expert_nodes": "ep_mode=nodes two_levels refuses",
    "expert_rows": "ep_mode= ways_to_experts",
    "few_kv_heads": "step04-4-tp=4 n_kv_heads=1 refuses",
    "fp16": "fp16 overflow scale",
    "grad_dtype": "grad_dtype",
    "grouped_matmul": "grouped default_flags definition",
    "hierarchical_sync": "hierarchical two_levels refuses",
    "muon": "muon",
    "narrow": "compress= compress_activations owed rounds_to int8 top-k",
    "offload_optimizer": "offload_optimizer where_the_flag refuses",
    "offload_params": "offload_params refuses",
    "overlap": "sync=overlap",
    "pipedream": "never_flushed",
    "pp_scatter": "pp_scatter refuses",
    "prefetch": "read_ahead",
    "routing": "definition routed deepseek switch groups capacity balance= refuses",
    "sgd": "[sgd optimizer=sgd",
    "skip_spikes": "spike refuses",
    "split_backward": "zb-h1 zb-h2 zbv",
    "torch_ddp": "sync=torch refuses",
    "tree_sync": "tree",
    "v_schedules": "v_half v-half v-min test_every_size",
    "visits": "definition routed groups capacity balance= ep_mode=",
    "window": "window halo band refuses",
    "zb_auto": "zb_auto zb-auto refuses",
    "zero_bubble": "zb_h zb-h zbv",
    "zero_keep": "zero_keep kept_for_a_step refuses said",
    "zero_overlap": "zero_overlap sums_start refuses",
    "zero_replicas": "zero_replicas refuses",
    "zero_toy": "prints_the_example",
}
SWAPS = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "/", "%": "//", "**": "*", "@": "+", "|": "&", "&": "|"}
SWAPS |= {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "in": "not in", "not in": "in"}
SWAPS |= {"is": "is not", "is not": "is", "and": "or", "or": "and"}
SYMBOL = re.compile(r"(?:\b(?:not\s+in|is\s+not|in|is|and|or)\b)|\*\*|//|[<>=!]=|[-+*/%@|&<>]")


class Mutant(NamedTuple):
    """One change of a file: its bytes first..last-1 become `new`."""

    file: str
    first: int
    last: int
    new: str

    def changed(self, source: bytes) -> bytes:
        """The file with it."""
        return source[: self.first] + self.new.encode() + source[self.last :]

    def text(self, source: bytes) -> str:
        """For the table: place, what stood there, and what stands there."""
        line = source[: self.first].count(b"\n") + 1
        return f"{self.file}:{line}  {source[self.first : self.last].decode()}  ->  {self.new}"


def visited(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes, but for annotations, formatted strings, and errors that are raised."""
    yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            skipped = name in ("annotation", "returns") or isinstance(child, (ast.JoinedStr, ast.Raise, ast.Assert))
            if isinstance(child, ast.AST) and not skipped:
                yield from visited(child)


def mutants(file: str, source: bytes) -> Iterator[Mutant]:
    """All of a file."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    begin = lambda node: starts[node.lineno - 1] + node.col_offset  # noqa: E731
    end = lambda node: starts[node.end_lineno - 1] + node.end_col_offset  # noqa: E731
    words = lambda node: source[begin(node) : end(node)].decode()  # noqa: E731

    def between(left: ast.AST, right: ast.AST) -> Iterator[Mutant]:
        """The operator that stands there."""
        found = SYMBOL.search(source[end(left) : begin(right)].decode())
        symbol = re.sub(r"\s+", " ", found.group())
        yield Mutant(file, end(left) + found.start(), end(left) + found.end(), SWAPS[symbol])

    for node in visited(ast.parse(source)):
        match node:
            case ast.Constant(value=bool(value)):
                yield Mutant(file, begin(node), end(node), str(not value))
            case ast.Constant(value=int(value) | float(value)):
                yield Mutant(
                    file, begin(node), end(node), repr(value + 1 if isinstance(value, int) else value * 1.5 or 1.0)
                )
            case ast.BinOp(left=left, right=right):
                yield from between(left, right)
            case ast.Compare(left=left, comparators=others):
                for one, other in zip([left, *others], others, strict=False):
                    yield from between(one, other)
            case ast.BoolOp(values=values):
                yield from between(values[0], values[1])
            case ast.UnaryOp(op=ast.Not() | ast.USub() as sign):
                yield Mutant(file, begin(node), begin(node) + (4 if isinstance(sign, ast.Not) else 1), "")
            case ast.Expr(value=ast.Call()):
                yield Mutant(file, begin(node), end(node), "pass")
            case ast.Call(func=ast.Attribute(attr=name) as method, args=[], keywords=[]):
                yield Mutant(file, end(method) - len(name) - 1, end(node), "")  # x.contiguous() becomes x
        if isinstance(node, ast.Call) and len(node.args) > 1 and words(node.func) not in ("max", "min"):
            one, other = node.args[:2]
            if words(one) != words(other) and not any(isinstance(arg, ast.Starred) for arg in (one, other)):
                yield Mutant(file, begin(one), end(other), f"{words(other)}, {words(one)}")


def judge(*words: str) -> int:
    """Runs in the copy: tests with one of the words in their ids, until one fails. The first failure is printed."""
    import pytest

    class Chosen:
        """What pytest asks."""

        def pytest_collection_modifyitems(self, items: list):
            """Only these."""
            items[:] = [item for item in items if any(word in item.nodeid for word in words)]

        def pytest_runtest_logreport(self, report):
            """Whose words are the verdict."""
            if report.failed:
                last = str(report.longrepr).strip().splitlines()[-1]
                print(f"VERDICT {report.nodeid.partition('::')[2]}: {last[:150]}")

        def pytest_collectreport(self, report):
            """A file that cannot be imported."""
            if report.failed:
                print(f"VERDICT {report.nodeid}: {str(report.longrepr).strip().splitlines()[-1][:150]}")

    def hangs(*_):
        raise TimeoutError(f"no end in {SECONDS} seconds")

    signal.signal(signal.SIGALRM, hangs)
    signal.alarm(SECONDS)
    files = [f"tests/test_{name}.py" for name in FILES.split()]
    return pytest.main(["-n", "0", "-x", "-q", "-p", "no:cacheprovider", *files], plugins=[Chosen()])


def main(n: int, seed: int, *only: int):
    """Draw, make, run, and print."""
    from jobs import Server  # beside this file

    sources = {f"variants/{name}.py": (ROOT / f"variants/{name}.py").read_bytes() for name in WORDS}
    everything = [mutant for file, source in sources.items() for mutant in mutants(file, source)]
    drawn = random.Random(seed).sample(everything, n)
    print(f"{n} of {len(everything)}", flush=True)
    with tempfile.TemporaryDirectory() as place:
        folder, server, noticed = Path(place, "copy"), Server(), 0
        for name in subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)

        def verdict(file: str) -> str:
            status, log = server.run(folder, 0, "tests/mutants.py", "judge", *WORDS[Path(file).stem].split())
            found = re.findall(r"^\.*F?E?VERDICT (.*)", log, re.MULTILINE)
            return found[0] if found else "" if status == 0 else f"status {status}: {log[-500:]}"

        @lru_cache
        def passes(file: str) -> bool:
            """With nothing changed."""
            if text := verdict(file):
                sys.exit(f"the right {file} fails: {text}")
            return True

        for i in only or range(n):
            mutant = drawn[i]
            passes(mutant.file)
            began = time.monotonic()
            (folder / mutant.file).write_bytes(mutant.changed(sources[mutant.file]))
            text = verdict(mutant.file)
            (folder / mutant.file).write_bytes(sources[mutant.file])
            noticed += bool(text)
            print(f"{i:3} {mutant.text(sources[mutant.file])}", flush=True)
            print(f"      {text or 'NOT NOTICED'}   ({time.monotonic() - began:.0f} s)", flush=True)
        print(f"{noticed} of {len(only or range(n))} noticed")
        server.stop()


if __name__ == "__main__":
    sys.exit(judge(*sys.argv[2:]) if sys.argv[1] == "judge" else main(*map(int, sys.argv[1:])))
