"""Can this machine train, and does it train right? One command, a table of pass and fail, and a file to keep.

    python -m services.certify                with one GPU or a node of them; without, what a CPU can show in 2 minutes
    python -m services.certify --only machine kernels          some parts of it

    1 machine      what is here, what is wrong with it and its mend; how fast ranks add up
    2 kernels      beside their formulas; the host does not wait; an uneven all-to-all; documents of new lengths
    3 equality     fp64, 6 steps: layouts beside one process, by their launch lines
    4 precision    bf16: the context modes, and offload, beside what they are to equal
    5 speed        MFU and memory beside what the dry run counts on this GPU (on a node also llama3-8b)
    6 recovery     a rank is killed: the job starts anew from its checkpoint, and goes on

It starts all ranks itself, by torchrun. (Under torchrun rank 0 does it, and the others leave.) Certificate and logs are
in --out: certificate.txt, certificate.json. Whatever does not begin in time is not certified; nor is what is not here.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from services.dry_run import GPUS
from services.machine import Finding, examine
from services.tables import human

ROOT = Path(__file__).parents[1]
SMALL = (
    "--model debug --steps 6 --global-batch-size 16 --micro-batch-size 1 --eval-every 0 --save-every 0 --warmup-steps 2"
)
SMALL += " --n-kv-heads 4 --n-layers 4 --lr 0.01"
DENSE, MOE = "--dense-layers 99", "--experts 4"
LAUNCHER = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_", "OMP_")


class Row(NamedTuple):
    """One line of the certificate. `passed` is None for what is not certified."""

    part: str
    what: str
    passed: bool | None
    found: str
    numbers: dict[str, float]


class Trial(NamedTuple):
    """A run beside another one of the same batch: ranks, step, flags; with what they are to agree on, and how well."""

    ranks: int
    step: str
    flags: str
    beside: str  # step and flags of one process
    bound: float


def equality(gpus: int) -> list[Trial]:
    """Part 3: all ranks on one GPU (or few, or the CPU), or a node's steps by their launch lines."""
    dense, moe = f"step07_moe_ep {DENSE}", f"step07_moe_ep {MOE}"
    if not gpus:
        few = [("step03_zero", "--zero 3"), ("step07_moe_ep", f"--tp 2 {DENSE}")]
        rows = [(2, *few[0], "step01_single_gpu"), (2, *few[1], dense), (2, "step07_moe_ep", f"--ep 2 {MOE}", moe)]
    elif gpus < 4:
        cuts = "--pp 2 --cp 2 --tp 2"
        rows = [(8, "step07_moe_ep", f"{cuts} {DENSE} {zero}", "step01_single_gpu") for zero in ("", "--zero 3")]
        rows += [(8, "step07_moe_ep", f"{cuts} {MOE} --ep 2", moe), (4, "step07_moe_ep", f"{MOE} --ep 4", moe)]
    else:
        pp = [
            (f"--pp 2 --schedule {s}", "step06_pipeline") for s in ("afab", "interleaved", "zb-h1", "zbv", "dualpipe")
        ]
        steps = [("", "step02_ddp"), ("--zero 3", "step03_zero"), ("--tp 2", "step04_tp_sp")]
        steps += [("--cp 2 --tp 2", "step05_cp_ring"), ("--pp 4", "step06_pipeline"), *pp]
        n = 8 if gpus >= 8 else 4
        rows = [(n, step, flags, "step01_single_gpu") for flags, step in steps]
        rows += [(n, "step07_moe_ep", f"--pp 2 --cp 2 --ep 2 --zero 3 {MOE}", moe)]
    return [Trial(*row, 1e-9) for row in rows]


def precision(gpus: int) -> list[Trial]:
    """Part 4."""
    n = 8 if gpus >= 8 else 4 if gpus >= 4 else 2
    modes = ("zigzag", "ring", "allgather", "ulysses") if gpus else ("zigzag",)
    kinds = [f"--cp-mode {mode}" for mode in modes] + ["--cp-kernel flash"] * (gpus > 0)
    rows = [Trial(n, "step05_cp_ring", f"--cp 2 {kind}", "step01_single_gpu", 2e-2) for kind in kinds]
    return [*rows, Trial(1, "step03_zero", "--zero 3 --offload-params cpu", "step03_zero --zero 3", 5e-3)]


def speeds(gpus: int) -> list[tuple[int, str, str]]:
    """Part 5: ranks, step, flags."""
    alone = "--model smollm-1.7b --dtype bf16 --global-batch-size 8 --micro-batch-size 4 --recompute full --steps 8"
    alone += " --loss-chunk 2048"
    rows = [(1, "step01_single_gpu", alone), (1, "step01_single_gpu", f"{alone} --compile")]
    if gpus >= 8:
        large = "--model llama3-8b --dtype bf16 --zero 3 --recompute full --steps 6 --micro-batch-size 1"
        large += " --loss-chunk 2048"
        rows += [(8, "step03_zero", f"{large} --global-batch-size 16")]
        rows += [
            (8, "step05_cp_ring", f"{large} --tp 2 --cp 4 --cp-kernel flash --seq-len 32768 --global-batch-size 2")
        ]
    return rows if gpus else []


def verdict(passed: bool | None) -> str:
    """As it is printed."""
    return {True: "pass", False: "FAIL", None: "  - "}[passed]


def steps_done(out: Path) -> int:
    """Rows of a run's metrics."""
    metrics = out / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == pid:
            found.append(int(path.parent.name))
    return found


def to_bytes(text: str) -> float:
    """The inverse of `human`."""
    number, unit = text.replace(",", "").split()
    return float(number) * 1024 ** ("B", "KiB", "MiB", "GiB").index(unit)


class Certificate:
    """Runs the parts, and keeps what they found."""

    def __init__(self, out: Path, minutes: float):
        self.out, self.rows, self.began, self.minutes = out, [], time.monotonic(), minutes
        self.gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        self.findings: list[Finding] = []
        self.train = lru_cache(self.train)  # what several are held beside runs once
        self.devices: list[str] = []  # first lines of runs
        out.mkdir(parents=True, exist_ok=True)

    def left(self) -> float:
        """Seconds."""
        return 60 * self.minutes - (time.monotonic() - self.began)

    def command(self, ranks: int, words: str) -> list[str]:
        """`python words`, or by torchrun for so many ranks (0: without)."""
        torchrun = f"-m torch.distributed.run --standalone --nproc_per_node={ranks}".split()
        torchrun += ["--max-restarts=1"] * ("--resume" in words)
        return [sys.executable, *(torchrun if ranks else ()), *words.split()]

    def start(self, ranks: int, words: str) -> tuple[subprocess.Popen, Path]:
        """Start a command, in the environment without what a torchrun around us has set; its log."""
        log = self.out / f"log-{len(list(self.out.glob('log-*'))):02d}.txt"
        kept = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHER)}
        kept |= dict(OMP_NUM_THREADS="1")
        with open(log, "w") as file:
            file.write(f"{ranks} ranks: {words}\n")
            file.flush()
            command = self.command(ranks, words)
            job = subprocess.Popen(command, cwd=ROOT, env=kept, stdout=file, stderr=file, start_new_session=True)
        return job, log

    def job(self, ranks: int, words: str) -> Path:
        """Run a command to its end; its log. Raises RuntimeError if it fails, TimeoutError if no time is left."""
        if self.left() < 0:
            raise TimeoutError
        job, log = self.start(ranks, words)
        seconds = max(60.0, self.left())
        try:
            status = job.wait(seconds)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"it did not end in {seconds:.0f} s (see {log})") from None
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
        if status:
            lines = log.read_text().splitlines()
            wrong = next((line for line in lines if "rror: " in line), lines[-1])
            raise RuntimeError(f"exit status {status}: {wrong.strip()[:90]} (see {log})")
        return log

    def train(self, ranks: int, step: str, flags: str) -> list[dict[str, Any]]:
        """Train; the rows of metrics.jsonl."""
        out = self.out / f"run-{len(list(self.out.glob('run-*'))):02d}"
        log = self.job(ranks, f"{step}.py {flags} --out {out}")
        self.devices += [line for line in log.read_text().splitlines() if line.startswith("device: ")]
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]

    def note(self, part: str, what: str, passed: bool | None, found: str, **numbers: float):
        """One more line, which is also printed."""
        self.rows.append(Row(part, what, passed, found, numbers))
        print(f"{verdict(passed)}  {part:<10} {what}: {found}", flush=True)

    def attempt(self, part: str, what: str, check: Any):
        """`check()` returns (passed, found, numbers); an error is a failure, no time left is not certified."""
        try:
            passed, found, numbers = check()
        except TimeoutError:
            passed, found, numbers = None, f"the {self.minutes:g} minutes are over", {}
        except (RuntimeError, OSError, ValueError) as error:
            passed, found, numbers = False, str(error).splitlines()[0], {}
        self.note(part, what, passed, found, **numbers)

    def machine(self):
        """Part 1."""
        self.findings = examine()
        for finding in self.findings:
            wrong = f"; {finding.problem}: {finding.mend}" if finding.problem else ""
            self.note("machine", finding.what, not finding.problem, finding.found + wrong)
        n = max(2, min(8, self.gpus))

        def exchange() -> tuple:
            numbers = self.probe(n, "exchange")
            best = max(2 * (n - 1) / n * int(size) / seconds for size, seconds in numbers.items())
            return best > 5e7, f"up to {best / 1e9:.2f} GB/s; {numbers['1024'] * 1e6:.0f} us for 1 KiB", numbers

        self.attempt("machine", f"all-reduce, {n} ranks", exchange)

    def probe(self, ranks: int, name: str) -> dict[str, float]:
        """What a probe says."""
        log = self.job(ranks, f"-m services.probes {name}").read_text()
        return json.loads(next(line for line in log.splitlines() if line.startswith("{")))

    def kernels(self):
        """Part 2."""
        bounds = dict(attention=dict(output=0.06, lse=1e-3, gradients=0.06), grouped=dict(error=0.03))
        bounds |= dict(uneven=dict(wrong=0.5)) | (dict(documents={"new / known": 2.0}) if self.gpus else {})
        for name, most in bounds.items():

            def check(name: str = name, most: dict = most) -> tuple:
                numbers = self.probe(max(1, self.gpus) if name == "uneven" else 0, name)
                found = ", ".join(f"{key} {n:.3g}" for key, n in numbers.items())
                return all(numbers[key] < bound for key, bound in most.items()), found, numbers

            self.attempt("kernels", name, check)

    def beside(self, part: str, trials: list[Trial], dtype: str):
        """Parts 3 and 4: losses and gradient norms of two runs."""
        for one in trials:

            def check(one: Trial = one) -> tuple:
                step, *flags = one.beside.split()
                both = (one.ranks, one.step, one.flags), (0, step, " ".join(flags))
                ours, right = (self.train(n, step, f"{SMALL} --dtype {dtype} {flags}") for n, step, flags in both)
                keys = ("loss", "grad_norm") if dtype == "fp64" else ("loss",)
                pairs = [(a[key], b[key]) for a, b in zip(ours, right, strict=True) for key in keys]
                worst = max(abs(a - b) / abs(b) for a, b in pairs)
                return worst < one.bound, f"{worst:.1e} (below {one.bound:g})", dict(worst=worst, bound=one.bound)

            self.attempt(part, f"{one.ranks} x {one.step} {one.flags}", check)

    def equality(self):
        """Part 3."""
        self.beside("equality", equality(self.gpus), "fp64")
        lines = [line for line in self.devices if "no backend" not in line] or ["device: no ranks met"]
        wanted = "nccl" if self.gpus >= 4 else "staged" if self.gpus else "gloo"
        met = all(f"; backend {wanted}" in line for line in lines)
        self.note("equality", "devices and backend", met, lines[-1].removeprefix("device: "))

    def precision(self):
        """Part 4."""
        self.beside("precision", precision(self.gpus), "bf16")

    def speed(self):
        """Part 5. Steps after the third count: before, CUDA and --compile make things ready."""
        if not self.gpus:
            self.note("speed", "MFU and memory", None, "there is no GPU here")
        for ranks, step, flags in speeds(self.gpus):

            def check(ranks: int = ranks, step: str = step, flags: str = flags) -> tuple:
                name = torch.cuda.get_device_name(0).lower()
                gpu = next((key for key in GPUS if key.split("-")[0] in name), "h100-80")
                dry = f"{flags.replace('--compile', '')} --dry-run {ranks} --gpu {gpu}"
                said = self.job(0, f"{step}.py {dry}").read_text()
                most = float(said.split("MFU is at most ")[1].split("%")[0]) / 100
                line = next(line for line in said.splitlines() if line.startswith("at the peak of "))
                peak = to_bytes(line.removeprefix("at the peak of ").split(":")[0])
                rows = self.train(ranks if ranks > 1 else 0, step, f"{flags} --eval-every 0 --save-every 0")[3:]
                mfu = sorted(row["mfu"] for row in rows)[len(rows) // 2]
                memory = max(row["peak_memory_bytes"] for row in rows)
                found = f"MFU {mfu:.1%} (roofline {most:.1%}), memory {human(memory)} (counted {human(peak)})"
                numbers = dict(mfu=mfu, roofline=most, memory=memory, counted=peak)
                return abs(memory / peak - 1) < 0.03 and mfu <= most, found, numbers

            self.attempt("speed", f"{ranks} x {step} {flags}", check)

    def recovery(self):
        """Part 6."""

        def check() -> tuple:
            out = self.out / "run-killed"
            flags = "--model debug --steps 30 --save-every 5 --eval-every 0 --dim 32 --n-heads 4 --zero 3 --resume auto"
            job, log = self.start(max(2, self.gpus), f"step03_zero.py {flags} --out {out}")
            try:
                self.until(lambda: steps_done(out) > 7 or job.poll() is not None)
                if job.poll() is not None:
                    raise RuntimeError(f"it ended by itself (see {log})")
                os.kill(children(job.pid)[-1], signal.SIGKILL)
                self.until(lambda: job.poll() is not None)
            finally:
                if job.poll() is None:
                    os.killpg(job.pid, signal.SIGKILL)
            went_on = "going on from" in log.read_text()
            found = f"exit status {job.poll()}, {steps_done(out)} of 30 steps{', went on from a checkpoint' * went_on}"
            return job.poll() == 0 and steps_done(out) == 30 and went_on, found, {}

        self.attempt("recovery", "a rank is killed", check)

    def until(self, done: Any):
        """Return when it is true. Raises TimeoutError."""
        deadline = time.monotonic() + max(60.0, self.left())
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.1)

    def text(self) -> str:
        """The certificate."""
        passed, name = [row.passed for row in self.rows], torch.cuda.get_device_name(0) if self.gpus else "GPU"
        lines = [f"certificate of {time.strftime('%Y-%m-%d')}: {self.gpus} x {name}, torch {torch.__version__}", ""]
        lines += [f"{verdict(row.passed)}  {row.part:<10} {row.what}\n      {row.found}" for row in self.rows]
        counts = f"{passed.count(True)} passed, {passed.count(False)} failed, {passed.count(None)} not certified"
        return "\n".join([*lines, "", f"{counts}, in {time.monotonic() - self.began:.0f} s"])

    def keep(self):
        """Write the files."""
        (self.out / "certificate.txt").write_text(self.text() + "\n")
        about = dict(gpus=self.gpus, torch=torch.__version__, cuda=torch.version.cuda)
        about["rows"] = [row._asdict() for row in self.rows]
        (self.out / "certificate.json").write_text(json.dumps(about, indent=1))


PARTS = ("machine", "kernels", "equality", "precision", "speed", "recovery")


def main(argv: list[str] | None = None) -> int:
    """The command. Exit status 1 if something failed."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m services.certify", description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="runs/certificate", metavar="DIR", help="where certificate and logs go")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts of the list")
    parser.add_argument("--minutes", type=float, default=10.0 if gpu else 2.0, help="after which nothing more begins")
    args = parser.parse_args(argv)
    if int(os.environ.get("RANK", 0)):
        return 0
    if not gpu:
        print("no GPU here: what a CPU can show; speed, NCCL and CUDA's kernels are not certified", flush=True)
    certificate = Certificate(Path(args.out).resolve(), args.minutes)
    for part in args.only:
        getattr(certificate, part)()
        certificate.keep()  # also if a later part should not end
    print(certificate.text().splitlines()[-1], f"see {certificate.out}/certificate.txt", sep="; ")
    return int(any(row.passed is False for row in certificate.rows))


if __name__ == "__main__":
    sys.exit(main())
