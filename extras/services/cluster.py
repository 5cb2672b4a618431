"""Simulates a cluster in one machine: nodes are Linux network namespaces, and the kernel limits their cables' speed.

    python -m extras.services.cluster --nodes 2 --ranks-per-node 2 --gbit 0.2 -- step04_tp_sp.py --tp 2

                      switch (a bridge)                  a node: a host name, an address, processes of its own
               port0 |                 | port1           a cable: each of its ends sends --gbit at most (tc's tbf)
        node0  eth0  |                 |  eth0  node1    /etc/hosts: node0 is 10.0.0.1, node1 is 10.0.0.2, ...
        rank 0   rank 1             rank 2   rank 3

Each node runs `torchrun --nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_endpoint=node0:29500 ...`; the words
after `--` end this command, and may begin with options of torchrun such as --max-restarts=3. Lines printed by nodes
other than node 0 begin with the node's name. While the job runs, you can type

    cable 1 off     to pull node 1's cable: what is sent to and from it is lost                   (cable 1 on)
    kill 1          to cut node 1's power: its processes are killed at once                       (start 1)

It needs Linux and iproute2, but not root: everything happens in namespaces of one process, and the kernel ends them
with it. Unlike in a real cluster, a cable has no length, nodes share the cores of one machine, and GPUs are hidden.
"""

import argparse
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from common import UserError

USERS, PROCESSES, NETWORK, MOUNTS, NAME = 2**28, 2**29, 2**30, 2**17, 2**26  # unshare(2): CLONE_NEWUSER, ...
LEAVE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE = 300  # times 0.2 seconds: how long other nodes may outlive node 0
NO_RIGHTS = "a cluster needs Linux, iproute2, util-linux, and the right to create networks (try as root): "
SWITCH = r"""
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs run /run
printf '127.0.0.1 localhost\n{hosts}' > /run/hosts
mount --bind /run/hosts /etc/hosts
ip link set lo up
ip link add switch type bridge
ip link set switch addrgenmode none up
"""
CABLE = """
ip link add port{n} type veth peer name eth0 netns {name}
ip link set port{n} addrgenmode none master switch up
ip -n {name} link set eth0 addrgenmode none up
ip -n {name} address add 10.0.0.{last}/24 dev eth0
tc qdisc add dev port{n} root tbf {speed}
tc -n {name} qdisc add dev eth0 root tbf {speed}
"""


def call(name: str, *args: int):
    """Call a function of the C library that Python does not offer. Raises UserError."""
    if getattr(ctypes.CDLL(None, use_errno=True), name, lambda *_: 1)(*args) != 0:
        raise UserError(f"{NO_RIGHTS}{name}: {os.strerror(ctypes.get_errno())}")


def run(script: str):
    """Run a shell script, which stops at its first failing command. Raises UserError with that command's message."""
    done = subprocess.run(["sh", "-ec", script], capture_output=True, text=True)
    if done.returncode:
        raise UserError(NO_RIGHTS + done.stderr.strip())


class Node:
    """A simulated machine: processes in one network namespace, which a cable connects to the switch."""

    def __init__(self, number: int, line: list[str], gbit: float):
        """`line`: the command that `start` runs. `gbit`: the speed of the node's cable in Gbit/s, each way."""
        self.number, self.name = number, f"node{number}"
        named = f"echo {self.name} > /proc/sys/kernel/hostname; exec {shlex.join(line)} < /dev/null"
        self.line = ["nsenter", f"--net=/run/netns/{self.name}", "unshare", "--uts", "sh", "-c", named]
        second = round(gbit * 1e9 / 8)  # bytes; a burst is a tenth of a millisecond's, but at least two packets
        self.speed = f"rate {round(gbit * 1e6)}kbit burst {max(2 * 1514, second // 10000)} limit {2**26}"
        run(f"ip netns add {self.name}; ip -n {self.name} link set lo up")

    def start(self):
        """Plug in the node's cable, and run its command. Raises UserError."""
        run(CABLE.format(n=self.number, name=self.name, last=self.number + 1, speed=self.speed))
        prefix = ["sed", "-u", f"s/^/{self.name}: /"]
        prefixed = subprocess.Popen(prefix, stdin=subprocess.PIPE).stdin if self.number else None
        self.process = subprocess.Popen(self.line, stdout=prefixed, stderr=prefixed)

    def cable(self, state: str):
        """Pull the node's cable at the switch ("off"), or plug it in again ("on"). Raises UserError."""
        run(f"ip link set port{self.number} {dict(off='down', on='up')[state]}")

    def kill(self):
        """Cut the node's power: first remove its cable, so that no packet leaves, then kill all. Raises UserError."""
        run(f"ip link delete port{self.number}")
        while self.process.poll() is None:
            run(f"ip netns pids {self.name} | xargs --no-run-if-empty kill -KILL || true")  # some may have just ended


def obey(nodes: list[Node]):
    """Read commands from the keyboard and carry them out, on a thread of its own."""
    for said in sys.stdin:
        try:
            command, number, *more = said.split()
            node = nodes[int(number)]
            dict(cable=node.cable, kill=node.kill, start=node.start)[command](*more)
        except (LookupError, TypeError, ValueError, UserError) as error:
            print(f"cluster: {said.strip()}: {error}; type cable, kill or start, and a node's number", flush=True)


def inside(args: argparse.Namespace) -> int:
    """Make the switch and the nodes, as process number 1 of the new namespaces; returns node 0's exit status."""
    call("prctl", 1, signal.SIGKILL)  # PR_SET_PDEATHSIG: this process ends with its parent
    os.setsid()  # a terminal sends Ctrl-C to `main` alone, which passes it on
    run(SWITCH.format(hosts="".join(rf"10.0.0.{n + 1} node{n}\n" for n in range(args.nodes))))
    line = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={args.nodes}"]
    line += [f"--nproc_per_node={args.ranks_per_node}", "--rdzv_backend=c10d", "--rdzv_endpoint=node0:29500"]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    nodes = [Node(n, line + args.line, args.gbit) for n in range(args.nodes)]

    def stop(*_):
        """Each node's torchrun asks its ranks to leave. A second signal ends everything at once."""
        for number in LEAVE:
            signal.signal(number, lambda *_: os._exit(130))
        for node in nodes:
            node.process.terminate()

    for number in LEAVE:
        signal.signal(number, stop)
    for node in nodes:
        node.start()
    threading.Thread(target=obey, args=(nodes,), daemon=True).start()
    grace = GRACE
    while any(node.process.poll() is None for node in nodes) and grace > 0:
        time.sleep(0.2)
        grace -= nodes[0].process.poll() is not None
    for node in (node for node in nodes if node.process.poll() is None):
        print(f"cluster: {node.name} has not ended with node0 and is killed", flush=True)
    return abs(nodes[0].process.poll())  # if a signal ended it: the signal's number


def main(argv: list[str]) -> int:
    """Enter new namespaces, fork the process that is number 1 there, and wait for it; returns an exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2, help="number of nodes")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="processes that torchrun starts on each node")
    parser.add_argument("--gbit", type=float, default=1.0, help="speed of a node's cable in Gbit/s, each way")
    parser.add_argument("line", nargs="*", help="after `--`: the end of torchrun's line")
    args = parser.parse_args(argv)
    os.environ["PATH"] += ":/usr/sbin:/sbin"  # ip and tc are there, but not every user's PATH has these
    ids = dict(setgroups="deny", uid_map=f"0 {os.getuid()} 1", gid_map=f"0 {os.getgid()} 1")
    try:
        if not args.line or not 1 <= args.nodes <= 200 or args.ranks_per_node < 1 or args.gbit <= 0:
            raise UserError(
                "--nodes is 1 to 200, --ranks-per-node and --gbit are above 0; after them: -- step02_ddp.py"
            )
        call("unshare", USERS | PROCESSES | NETWORK | MOUNTS | NAME)
        for file, text in ids.items():
            Path("/proc/self", file).write_text(text)
        if (first := os.fork()) == 0:
            os._exit(inside(args))  # the thread that reads the keyboard would block Python's shutdown
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    for number in LEAVE:
        signal.signal(number, lambda number, _: os.kill(first, number))
    return abs(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
