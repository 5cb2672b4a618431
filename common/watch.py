"""How a run ends early. `noting_signals`: a signal ends it after the current step. `time_limit`: if
a step takes longer than --timeout, the process ends at once.

SIGNALS. During training, Ctrl-C (SIGINT), SIGTERM and SIGUSR1 are only noted. A rank must not stop
alone: the others would wait for it. So after each step `Run.steps` asks all ranks whether one of
them has noted a signal. If so, all save a checkpoint, and exit with status 0. A second Ctrl-C ends
the run at once, without saving, if the first has been noted.

With torchrun, send the signal to torchrun. It passes Ctrl-C and SIGTERM on to the ranks. It waits
up to 30 seconds, or its --shutdown-timeout, for them to end, and kills those that have not: the
step and the saving must not take longer. Then it ends with a SignalException and status 1, even if
all ranks have ended well.

SLURM can send SIGUSR1 before the time is over (--signal=USR1@120: to torchrun, which srun starts).
Unhandled, it kills torchrun, and the ranks go on. With this flag torchrun passes it on, too:

    torchrun --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 ...

If a rank has failed, torchrun sends SIGTERM to the others. Without that rank they cannot save: they
end by an error of a collective, or torchrun kills them.

If the terminal is closed (SIGHUP), the ranks end without saving: use tmux. (With torchrun, nohup
does not help, because torchrun handles the signal itself.)

TIME LIMIT. The first rank whose step takes longer than --timeout prints its stacks, and ends. Then
torchrun sends SIGTERM to the others, which does not end them: each prints its stacks and ends when
its own limit passes, unless a collective fails before, or torchrun kills it.
"""

import faulthandler
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # Ctrl-C; batch systems send the others


@contextmanager
def noting_signals() -> Iterator[list[int]]:
    """A context in which Ctrl-C, SIGTERM and SIGUSR1 are noted, in the list that it yields, so that
    the run can save.

    After the first signal, Ctrl-C has the system's default action again: it ends the process at
    once, without a KeyboardInterrupt. After a Ctrl-C, SIGTERM also ends it at once, because
    torchrun sends SIGTERM for a second Ctrl-C. Otherwise a later SIGTERM is only noted: torchrun
    also sends it when another rank has reached its time limit, and this one must live on to print
    its own stacks.

    Python runs a handler only between its own instructions. So while a rank waits in a collective,
    or for the GPU, which is C++ code, its first signal is not noted yet. If that never returns, the
    rank cannot save: it is ended by --timeout, by PyTorch's own limit, or killed by torchrun.
    """
    noted: list[int] = []

    def note(number: int, frame: Any):
        noted.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if number == signal.SIGINT:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    old_handlers = {}
    for number in SIGNALS:  # `signal` returns the handler that it replaces
        old_handlers[number] = signal.signal(number, note)
    try:
        yield noted
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


@contextmanager
def time_limit(seconds: float, out: Path) -> Iterator[None]:
    """A context for one step. If it takes longer than `seconds` (0: no limit), print the stacks of
    this rank's threads, and end its process.

    If one rank is stuck, the others soon wait for it in a collective, and usually print their
    stacks at about the same time. The rank whose stack differs is most likely the stuck one. On
    GPUs a stack often shows only that Python waits for the GPU. So each rank also writes PyTorch's
    record of its last NCCL collectives to OUT/nccl-RANK. Run `torchfrtrace --prefix nccl- OUT`,
    which comes with PyTorch: it says in which collective each rank is.

    Only steps are timed, not the start or saving. PyTorch has limits of its own for a wait in one
    collective: 10 minutes with NCCL, 30 with gloo. --timeout is 10 minutes by default. It comes
    first, because its time begins with the step. If you set a larger one, PyTorch's limit may come
    first, and ends the run without these stacks.

    The timer is a thread of its own. It also runs while the main thread waits in a collective,
    which releases the GIL.
    """
    timer = threading.Timer(seconds, print_stacks_and_exit, (seconds, out))
    timer.daemon = True  # a timer that waits does not keep Python alive
    if seconds:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def print_stacks_and_exit(seconds: float, out: Path):
    """Print the stacks, write NCCL's record, end the process. The timer's thread calls this."""
    rank = os.environ.get("RANK", "0")
    text = f"error: rank {rank}: a step has taken {seconds:g} s (--timeout). The rank's threads:\n"
    try:
        # faulthandler writes to the descriptor of a file, not to a string
        with tempfile.TemporaryFile("w+") as stacks:
            faulthandler.dump_traceback(stacks)
            stacks.seek(0)
            text += stacks.read()
        sys.stderr.write(text)  # in one call, so that the ranks' stacks rarely mix
        sys.stderr.flush()
        if dist.is_initialized() and dist.get_backend() == "nccl":
            record = torch._C._distributed_c10d._dump_nccl_trace()  # no public function has it
            (out / f"nccl-{rank}").write_bytes(record)
    except Exception as error:
        traceback.print_exception(error)
    finally:
        os._exit(1)  # sys.exit would end only this thread
