"""Simulates a cluster in one machine: nodes are Linux network namespaces, and the kernel limits
their cables' speed.

    python -m extras.tools.cluster --nodes 2 --ranks-per-node 2 --gbit 0.2 -- step04_tp_sp.py --tp 2

                      switch (a bridge)
               port0 |                 | port1           a cable: each end sends --gbit at most
        node0  eth0  |                 |  eth0  node1    /etc/hosts: node0 is 10.0.0.1, and so on
        rank 0   rank 1             rank 2   rank 3

Each node runs `torchrun --nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d
--rdzv_endpoint=node0:29500 ...`; the words after `--` end this command, and may begin with options
of torchrun such as --log-dir=logs.

It needs Linux, iproute2 and util-linux, but not root: everything happens in namespaces of one
process, and when this process ends, the kernel removes them. Unlike in a real cluster, a cable adds
no latency of its own, nodes share the cores of one machine, and GPUs are hidden.
"""

import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass

from common import UserError
from common.flags import flag, parse
from extras.start import start

# Starts a command in new namespaces. If one process of this chain is killed, so are those that it
# has started.
ENTER = "setpriv --pdeathsig KILL unshare --map-root-user --net --uts --mount --mount-proc --pid"
ENTER += " --fork --kill-child"
INSIDE = "import sys; from extras.tools import cluster; cluster.inside(sys.argv[1:])"
TRY = "ip link add switch type bridge; "
TRY += "tc qdisc add dev switch root tbf rate 1mbit burst 2kb limit 9kb"
NO_RIGHTS = (
    "a cluster needs Linux, iproute2, util-linux, and the right to create networks (try as root): "
)
SWITCH = r"""
mount -t tmpfs run /run
printf '127.0.0.1 localhost\n{hosts}' > /run/hosts
mount --bind /run/hosts /etc/hosts
ip link set lo up
ip link add switch type bridge
ip link set switch addrgenmode none up
"""
NODE = """
ip netns add {name}
ip -n {name} link set lo up
ip link add port{n} type veth peer name eth0 netns {name}
ip link set port{n} addrgenmode none master switch up
ip -n {name} link set eth0 addrgenmode none up
ip -n {name} address add 10.0.0.{last}/24 dev eth0
tc qdisc add dev port{n} root tbf {speed}
tc -n {name} qdisc add dev eth0 root tbf {speed}
"""


@dataclass
class Config:
    """Flags of the cluster."""

    nodes: int = flag(2, "number of nodes", least=1)
    ranks_per_node: int = flag(1, "processes that torchrun starts on each node", least=1)
    gbit: float = flag(1.0, "speed of a node's cable in Gbit/s, each way")


def run(script: str):
    """Run a shell script, which stops at its first failing command. Raises UserError with that
    command's message.
    """
    done = subprocess.run(["sh", "-ec", script], capture_output=True, text=True)
    if done.returncode:
        raise UserError(NO_RIGHTS + done.stderr.strip())


def probe():
    """Raise UserError if no cluster is possible here."""
    # Ip and tc are there, but not every user's PATH has these
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    run(f"{ENTER} sh -ec '{TRY}'")


def start_node(number: int, line: list[str], gbit: float) -> subprocess.Popen:
    """Create a node (a network namespace that a cable connects to the switch) and run `line` in it.
    Raises UserError.

    `gbit`: the speed of the cable in Gbit/s, each way.
    """
    # Bytes that the cable carries in a second
    name, second = f"node{number}", round(gbit * 1e9 / 8)
    # Bytes of a tenth of a millisecond, but at least two packets
    burst = max(2 * 1514, second // 10000)
    speed = f"rate {round(gbit * 1e6)}kbit burst {burst} limit {2**26}"
    run(NODE.format(n=number, name=name, last=number + 1, speed=speed))
    named = f"echo {name} > /proc/sys/kernel/hostname; exec {shlex.join(line)} < /dev/null"
    line = ["nsenter", f"--net=/run/netns/{name}", "unshare", "--uts", "sh", "-c", named]
    return subprocess.Popen(line)


def inside(argv: list[str]):
    """As process 1 of the namespaces that `main` creates, make the switch and the nodes; exit with
    node 0's status.
    """
    config, words = read_line(argv)
    signal.signal(signal.SIGINT, lambda *_: None)  # ignored: each node's torchrun gets it, too
    run(SWITCH.format(hosts="".join(rf"10.0.0.{n + 1} node{n}\n" for n in range(config.nodes))))
    line = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={config.nodes}"]
    line += [f"--nproc_per_node={config.ranks_per_node}"]
    line += ["--rdzv_backend=c10d", "--rdzv_endpoint=node0:29500", *words]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    nodes = [start_node(n, line, config.gbit) for n in range(config.nodes)]
    status = nodes[0].wait()
    for node in nodes[1:]:
        with suppress(subprocess.TimeoutExpired):
            node.wait(60)  # seconds; then it is killed
    sys.exit(abs(status))


def read_line(argv: list[str]) -> tuple[Config, list[str]]:
    """The flags, and the words after `--`. Raises UserError."""
    end = argv.index("--") if "--" in argv else len(argv)
    config = parse(Config, argv[:end])
    words = argv[end + 1 :]
    if not words:
        raise UserError("end the line with torchrun's words, such as -- step02_ddp.py")
    if config.nodes > 200 or not 1e-6 <= config.gbit <= 1000:
        raise UserError("--nodes is 1 to 200, and --gbit 1e-6 to 1000")
    return config, words


def main(argv: list[str]):
    """Start `inside` in new namespaces, wait for it, and exit with its status. Raises UserError."""
    read_line(argv)
    probe()
    # In a session of its own: else a terminal would send Ctrl-C to the nodes, too, and `pass_on`
    # would send it again.
    job = subprocess.Popen(
        [*ENTER.split(), sys.executable, "-c", INSIDE, *argv], start_new_session=True
    )

    def pass_on(number: int, _: object):
        """Send a signal to all nodes. If the same signal comes again, it ends this process, and
        thereby everything.
        """
        signal.signal(number, signal.SIG_DFL)
        os.killpg(job.pid, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    sys.exit(abs(job.wait()))


if __name__ == "__main__":
    start(main)
