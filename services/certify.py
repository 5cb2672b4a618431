"""Can this machine train, and does it train right? One command, a table of verdicts, and a file to keep.

    python -m services.certify                with one GPU or a node of them; without, what a CPU can show in 10 minutes
    python -m services.certify --only machine kernels          some parts of it

    1 machine      what is here, what is wrong with it and its mend; each pair's link, all-reduces, a matmul on each GPU
                   with its clocks, throttling and ECC errors, Xids
    2 kernels      beside their formulas; the host does not wait; an uneven all-to-all; documents of new lengths
    3 equality     fp64: rows of the tests' table beside one process, by their launch lines (tests/launches.py)
    4 precision    bf16: the same for each step's row, context modes, offload, experts; on GPUs also --compile, and
                   README's first command
    5 speed        MFU and memory beside what is expected of this GPU (services/expected.py); on a node also llama3-8b
    6 recovery     a rank is killed: the job starts anew from its checkpoint, and goes on

Each line measures something on every rank, and services/limits.py judges it. Of its verdicts

    pass    it was measured, and is within its limits on every rank
    FAIL    it is beyond a limit on some rank, which is named; or a job ended by an error, or hung
    note    it was measured, but for some of it no limit is known (links through the host; a GPU that no table has)
      -     not certified: it was not measured, for there is no such device, program, memory, or no time left

It takes 25 minutes at most, on a CPU 10: a part ends when its share, and what earlier ones have left, is over. It
starts all ranks itself, by torchrun. (Under torchrun rank 0 does it, and the others leave.) Certificate and logs are in
--out: certificate.txt, certificate.json.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from services import devices, expected, launch, machine, nvidia
from services.limits import FAIL, NOTE, OPEN, PASS, Found, Limit, NotCertified, judge
from services.tables import human
from theory.gpus import ROOM

ROOT = Path(__file__).parents[1]
LEAST = 15.0  # seconds: with less time left no job begins
PARTS = dict(machine=2.5, kernels=2.0, equality=6.0, precision=5.5, speed=6.0, recovery=3.0)  # minutes: estimates
LONGEST = dict(machine=90.0, kernels=90.0, equality=180.0, precision=240.0, speed=600.0, recovery=150.0)  # s: a hang
KERNELS = {  # probe -> limits
    "attention": dict(output=Limit(most=0.06), lse=Limit(most=1e-3), gradients=Limit(most=0.06)),
    "grouped": dict(error=Limit(most=0.03)),
    "uneven": dict(wrong=Limit("rows that others sent", most=0)),
    "documents": {"new / known": Limit("new lengths cost a plan each", most=10)},
}
CAPPED = ("A10", "L4", "T4")  # cards of up to 150 W: their power ends before the matrix units do


class Finding(NamedTuple):
    """One line of the certificate."""

    part: str
    what: str
    verdict: str  # of services/limits.py
    found: str
    numbers: Found


class Trial(NamedTuple):
    """A row of the tests' table, as it is launched, and one process that trains on the same sequences."""

    part: str
    what: str  # in a few words
    ranks: int
    line: str  # the script and its flags
    beside: str  # those of the one process
    numbers: list[str]  # of metrics.jsonl, that both have
    bound: float  # how far they may be apart, relatively
    steps: int | None = None  # of the first so many; None: of all


def trials(gpus: int) -> list[Trial]:
    """Parts 3 and 4 on such a machine: tests/launches.py says it. Nothing here imports a test."""
    command = [sys.executable, "-m", "tests.launches", str(gpus)]
    lines = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    return [Trial(**json.loads(line)) for line in lines]


def speeds(gpus: int) -> list[expected.Launch]:
    """Part 5."""
    alone = "--model smollm-1.7b --dtype bf16 --global-batch-size 8 --micro-batch-size 4 --recompute full"
    alone += " --loss-chunk 2048"
    rows = [expected.Launch(1, "step01_single_gpu", f"{alone}{more}") for more in ("", " --compile")] if gpus else []
    if gpus >= 8:
        rows += [expected.read(f"8 x {line.replace('.py', '', 1)}") for line in expected.EIGHT[:2]]
        one = "--model llama3-8b " + expected.BIG.replace("-batch-size 8", "-batch-size 1")  # sequence for all ranks
        rows.append(expected.Launch(8, "step04_tp_sp", f"{one} --tp 8"))
        more = "--zero 3 --tp 2 --cp 4 --cp-kernel flash --seq-len 32768"
        rows.append(expected.Launch(8, "step05_cp_ring", f"{one} {more}"))
    return rows


def metrics(out: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl, as far as there are any."""
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Certificate:
    """Runs the parts, and keeps what they found."""

    def __init__(self, out: Path, minutes: float, only: tuple[str, ...] = tuple(PARTS)):
        self.out, self.lines, self.began, self.minutes = out, [], time.monotonic(), minutes
        self.only, self.now = only, only[-1]  # the parts, and that of this moment
        self.gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        self.train = lru_cache(self.train)  # what several are held beside runs once
        self.devices: list[str] = []  # first lines of runs
        out.mkdir(parents=True, exist_ok=True)

    def left(self) -> float:
        """Seconds of this part: its share, and what those before it have not taken."""
        shares = {part: PARTS[part] for part in self.only if self.gpus or part != "speed"}
        until = sum(shares.get(part, 0.0) for part in self.only[: self.only.index(self.now) + 1])
        return 60 * self.minutes * until / sum(shares.values()) - (time.monotonic() - self.began)

    def over(self) -> NotCertified:
        """To raise when no time is left."""
        return NotCertified(f"of {self.minutes:g} minutes those for {self.now} are over")

    def start(self, ranks: int, words: str) -> tuple[subprocess.Popen, Path]:
        """Start a command; its log. Raises NotCertified if no time is left."""
        if self.left() < LEAST:
            raise self.over()
        log = self.out / f"log-{len(list(self.out.glob('log-*'))):02d}.txt"
        with open(log, "w") as file:
            file.write(f"{ranks} ranks: {words}\n")
            file.flush()
            return launch.start(ROOT, ranks, shlex.split(words), stdout=file, stderr=file), log

    def job(self, ranks: int, words: str) -> Path:
        """Run a command to its end; its log. Raises RuntimeError if it fails or hangs, NotCertified as `start`."""
        job, log = self.start(ranks, words)
        self.until(lambda: job.poll() is not None, job, log)
        if job.returncode:
            lines = log.read_text().splitlines()
            wrong = next((line for line in lines if "rror: " in line), lines[-1])
            raise RuntimeError(f"exit status {job.returncode}: {wrong.strip()[:90]} (see {log})")
        return log

    def answer(self, ranks: int, words: str) -> dict[str, Any]:
        """The line of JSON that a command prints. Raises RuntimeError if there is none, and as `job`."""
        log = self.job(ranks, words)
        lines = [line for line in log.read_text().splitlines() if line.startswith("{")]
        if not lines:
            raise RuntimeError(f"it answered nothing (see {log})")
        return json.loads(lines[-1])

    def until(self, done: Callable[[], bool], job: subprocess.Popen, log: Path):
        """Return when it is true. Else the job ends: RuntimeError if it hangs, NotCertified if the time is over."""
        start, longest = time.monotonic(), LONGEST[self.now]
        try:
            while not done():
                if time.monotonic() - start > longest:
                    raise RuntimeError(f"it did not end in {longest:g} s (see {log})")
                if self.left() < 0:
                    raise self.over()
                time.sleep(0.05)
        except BaseException:
            launch.stop(job)
            raise

    def train(self, ranks: int, line: str) -> list[dict[str, Any]]:
        """Train; the rows of metrics.jsonl."""
        out = self.out / f"run-{len(list(self.out.glob('run-*'))):02d}"
        log = self.job(ranks, f"{line} --out {out}")
        self.devices += [line for line in log.read_text().splitlines() if line.startswith("device: ")]
        return metrics(out)

    def note(self, part: str, what: str, verdict: str, text: str, numbers: Found | None = None):
        """One more line, which is also printed."""
        self.lines.append(Finding(part, what, verdict, text, numbers or {}))
        print(f"{verdict}  {part:<10} {what}: {text}", flush=True)

    def attempt(self, part: str, what: str, measure: Callable[[], tuple[Found, dict[str, Limit]]]):
        """Judge what `measure()` returns, beside its limits. An error is a failure."""
        numbers: Found = {}
        try:
            numbers, limits = measure()
            verdict, text = judge(numbers, limits)
        except NotCertified as reason:
            verdict, text = OPEN, str(reason)
        except (RuntimeError, OSError, ValueError) as error:
            verdict, text = FAIL, str(error).splitlines()[0]
        self.note(part, what, verdict, text, numbers)

    def machine(self):
        """Part 1."""
        for finding in machine.examine():
            wrong = f"; {finding.problem}: {finding.mend}" if finding.problem else ""
            self.note("machine", finding.what, FAIL if finding.problem else PASS, finding.found + wrong)
        try:
            links = machine.look_at_links()
        except RuntimeError as error:
            self.note("machine", "links", FAIL, str(error).splitlines()[0])
            links = {"unknown": {}}
        for kind, pairs in links.items():
            limits = dict(copy=machine.link_limit(kind))
            self.attempt("machine", f"links: {kind}", lambda pairs=pairs, limits=limits: (pairs, limits))
        n = max(2, min(8, self.gpus))
        bus = machine.bus_limit({*links}, torch.cuda.get_device_name(0) if self.gpus > 1 else "")
        limits = {"256 MiB" if self.gpus else "64 MiB": bus, "wrong": Limit("sums over all ranks", most=0)}
        self.attempt("machine", f"all-reduce, {n} ranks", lambda: (self.probe(n, "exchange"), limits))
        if self.gpus:
            self.attempt("machine", "matmul", self.matmul)
            self.attempt("machine", "Xids", self.xids)

    def matmul(self) -> tuple[Found, dict[str, Limit]]:
        """Of 8192 x 8192 matrices on all GPUs at a time."""
        limits = {
            "wrong": Limit("numbers that the same product had not", most=0),
            "SM clock": Limit("of the highest, under load", least=0.5),
            "uncorrected ECC errors": Limit("since the driver was loaded: reset this GPU", most=0),
            **{reason: Limit("see its cooling and power", most=0) for reason in nvidia.SLOWED.values()},
        }
        name = torch.cuda.get_device_name(0)
        known, capped = devices.known_peak(name), any(key in name.split() for key in CAPPED)
        limits["of peak"] = Limit("a card of little power") if capped else Limit("of the data sheet", least=0.55)
        if self.gpus > 1 or not known:  # else there is nothing that one could be held beside
            limits["TFLOP/s"] = Limit("beside the others", part=0.9)
        return self.probe(self.gpus, "matmul"), limits

    def xids(self) -> tuple[Found, dict[str, Limit]]:
        """The driver's lines in the kernel's log. Raises NotCertified if it cannot be read."""
        log = nvidia.say(nvidia.LOG)
        if not log:
            raise NotCertified("dmesg does not show the kernel's log here (as root it may)")
        seen = nvidia.read_log(log)
        kinds = {f"Xid {xid}": xid for counts in seen.values() for xid in counts}
        errors = {gpu: {kind: float(counts[xid]) for kind, xid in kinds.items()} for gpu, counts in seen.items()}
        programs = Limit("since the node started; a program's mistake may bring it, too", " times")
        sick = Limit("since the node started: see NVIDIA's Xid catalog, reset the GPU", " times", most=0)
        limits = {kind: programs if xid in nvidia.OF_PROGRAMS else sick for kind, xid in kinds.items()}
        return (errors, limits) if errors else ({"": dict(Xids=0.0)}, dict(Xids=sick))

    def probe(self, ranks: int, name: str) -> Found:
        """What a probe says, by rank."""
        return self.answer(ranks, f"-m services.probes {name}")

    def require_bf16(self):
        """Raises NotCertified if these GPUs lack it, and kernels that are made for it."""
        if self.gpus and torch.cuda.get_device_capability(0) < (8, 0):
            raise NotCertified("GPUs before architecture 8.0 have no bf16")

    def kernels(self):
        """Part 2. On all GPUs at a time."""
        for name, limits in KERNELS.items():

            def measure(name: str = name, limits: dict = limits) -> tuple:
                self.require_bf16()
                return self.probe(self.gpus or 2 * (name == "uneven"), name), limits

            if self.gpus or name != "documents":
                self.attempt("kernels", name, measure)

    def beside(self, part: str, trials: list[Trial]):
        """Parts 3 and 4: numbers of two runs."""
        for one in (one for one in trials if one.part == part):

            def measure(one: Trial = one) -> tuple:
                if part == "precision":
                    self.require_bf16()
                steps = [*zip(self.train(one.ranks, one.line), self.train(0, one.beside), strict=True)][: one.steps]
                apart = max(abs(a[key] - b[key]) / abs(b[key]) for a, b in steps for key in one.numbers)
                return {"": dict(apart=apart)}, dict(apart=Limit(most=one.bound))

            self.attempt(part, one.what, measure)

    def rows(self, part: str):
        """Those of the tests' table; a copy for students has none."""
        if (ROOT / "tests" / "launches.py").exists():
            self.beside(part, trials(self.gpus))
        else:
            self.note(part, "rows of tests/rows.py", OPEN, "there are no tests here")

    def equality(self):
        """Part 3."""
        self.rows("equality")
        lines = [line.removeprefix("device: ") for line in self.devices if "no backend" not in line]
        met = [f"; backend {self.backend(line)}" in line for line in lines]
        verdict = OPEN if not met else PASS if all(met) else FAIL
        odd = (line for line, right in zip(lines, met, strict=True) if not right)
        self.note("equality", "devices and backend", verdict, next(odd, lines[-1] if lines else "no ranks met"))

    def backend(self, line: str) -> str:
        """Through which these ranks should talk; `line` is their first: "2 ranks on 1 x ..."."""
        ranks = sum(int(count) for count in re.findall(r"(\d+) ranks? on", line))
        return "gloo" if not self.gpus else "nccl" if ranks <= self.gpus else "staged"

    def precision(self):
        """Part 4."""
        self.rows("precision")

    def counted(self, line: expected.Launch) -> expected.Expected:
        """What is expected of a line, counted in a process of its own; --compile is not."""
        gpu = devices.gpu_of(torch.cuda.get_device_name(0)) or "h100-80"
        words = ["-m", "services.expected", "--gpu", gpu, "--line", str(line).replace(" --compile", "")]
        counted = self.answer(0, shlex.join(words))
        ranges = {key: expected.Range(*value) for key, value in counted.items() if isinstance(value, list)}
        return expected.Expected(**counted | ranges)

    def speed(self):
        """Part 5. Steps after the third count: before, CUDA and --compile make things ready."""
        if not self.gpus:
            self.note("speed", "MFU and memory", OPEN, "there is no GPU here")
        for line in speeds(self.gpus):

            def measure(line: expected.Launch = line) -> tuple:
                self.require_bf16()
                name, said = torch.cuda.get_device_name(0), self.counted(line)
                if said.memory.best > ROOM * torch.cuda.get_device_properties(0).total_memory:
                    raise NotCertified(f"it takes {human(said.memory.best)}, which this GPU does not have")
                words = f"{line.step}.py {line.flags} --steps 7 --eval-every 0 --save-every 0"
                rows = self.train(line.ranks if line.ranks > 1 else 0, words)[3:]
                mfu = sorted(row["mfu"] for row in rows)[len(rows) // 2]
                memory = max(row["peak_memory_bytes"] for row in rows) / 2**30
                limits = dict(MFU=Limit("no limit is known for this GPU"))
                if devices.gpu_of(name):
                    roof = f"half of what its roofline and messages leave, {said.mfu.best:.1%}"
                    limits["MFU"] = Limit(roof, least=said.mfu.best / 2, most=1.0)
                if "--compile" not in line.flags:  # which keeps other activations
                    limits["memory"] = Limit("a tenth more than counted", " GiB", most=said.memory.worst / 2**30)
                return {"": dict(MFU=mfu, memory=memory)}, limits

            self.attempt("speed", str(line), measure)

    def recovery(self):
        """Part 6."""

        def measure() -> tuple:
            out = self.out / "run-killed"
            words = "--max-restarts=1 step03_zero.py --model debug --steps 30 --save-every 5 --eval-every 0 --dim 32"
            words += " --n-heads 4 --zero 3 --resume auto"
            job, log = self.start(max(2, self.gpus), f"{words} --out {out}")
            self.until(lambda: len(metrics(out)) > 7 or job.poll() is not None, job, log)
            if job.poll() is not None:
                raise RuntimeError(f"it ended by itself (see {log})")
            os.kill(launch.children(job.pid)[-1], signal.SIGKILL)
            self.until(lambda: job.poll() is not None, job, log)
            numbers = {"exit status": job.poll(), "steps": len(metrics(out))}
            numbers["went on from a checkpoint"] = float("going on from" in log.read_text())
            limits = {"exit status": Limit(least=0, most=0), "steps": Limit(least=30, most=30)}
            return {"": numbers}, limits | {"went on from a checkpoint": Limit(least=1)}

        self.attempt("recovery", "a rank is killed", measure)

    def text(self) -> str:
        """The certificate."""
        verdicts, name = [line.verdict for line in self.lines], torch.cuda.get_device_name(0) if self.gpus else "GPU"
        lines = [f"certificate of {time.strftime('%Y-%m-%d')}: {self.gpus} x {name}, torch {torch.__version__}", ""]
        lines += [f"{one.verdict}  {one.part:<10} {one.what}\n      {one.found}" for one in self.lines]
        words = {PASS: "passed", FAIL: "failed", NOTE: "notes", OPEN: "not certified"}
        counts = ", ".join(f"{verdicts.count(verdict)} {word}" for verdict, word in words.items())
        return "\n".join([*lines, "", f"{counts}, in {time.monotonic() - self.began:.0f} s"])

    def keep(self):
        """Write the files."""
        (self.out / "certificate.txt").write_text(self.text() + "\n")
        about = dict(gpus=self.gpus, torch=torch.__version__, cuda=torch.version.cuda)
        about["rows"] = [line._asdict() for line in self.lines]
        (self.out / "certificate.json").write_text(json.dumps(about, indent=1))


def main(argv: list[str] | None = None) -> int:
    """The command. Exit status 1 if something failed."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m services.certify", description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="runs/certificate", metavar="DIR", help="where certificate and logs go")
    parser.add_argument("--only", nargs="+", choices=[*PARTS], default=[*PARTS], help="parts of the list")
    parser.add_argument("--minutes", type=float, default=sum(PARTS.values()) if gpu else 10.0, help="at most, in all")
    args = parser.parse_args(argv)
    if int(os.environ.get("RANK", 0)):
        return 0
    if not gpu:
        print("no GPU here: what a CPU can show; speed, NCCL and CUDA's kernels are not certified", flush=True)
    certificate = Certificate(
        Path(args.out).resolve(), args.minutes, tuple(part for part in PARTS if part in args.only)
    )
    for part in certificate.only:
        certificate.now = part
        getattr(certificate, part)()
        certificate.keep()  # also if a later part should not end
    print(certificate.text().splitlines()[-1], f"see {certificate.out}/certificate.txt", sep="; ")
    return int(any(line.verdict == FAIL for line in certificate.lines))


if __name__ == "__main__":
    sys.exit(main())
