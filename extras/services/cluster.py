"""A cluster in one machine: nodes that are Linux network namespaces, cables whose speed the kernel limits.

    python -m extras.services.cluster --nodes 2 --ranks-per-node 2 --gbit 0.2 -- step04_tp_sp.py --tp 2

                      switch (a bridge)                  a node: a host name, an address, processes of its own
               port0 |                 | port1           a cable: both of its ends send --gbit at most (tc's tbf)
        node0  eth0  |                 |  eth0  node1    /etc/hosts: node0 is 10.0.0.1, node1 is 10.0.0.2, ...
        rank 0   rank 1             rank 2   rank 3

Each node runs `torchrun --nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_endpoint=node0:29500 ...`, as it would
on two machines. What stands after `--` ends this line, and may begin with more of torchrun's options, such as
--max-restarts=3. The screen is node 0's; a line of another node has its name before it. While the job runs, type

    cable 1 off     node 1's cable is pulled: what is sent to it, and what it sends, is lost      (cable 1 on)
    kill 1          node 1 loses its power: none of its processes says good-bye                   (start 1)
    slow 1 10       node 1's processes sleep nine tenths of the time                              (slow 1 1)

Needs Linux and iproute2, and no root: all of it happens in namespaces of one process, which no packet leaves. However
that process ends, the kernel ends all the others, and the network with them. Not as in a real cluster: a cable has no
length, and nodes share the machine's cores. GPUs are hidden.
"""

import argparse
import ctypes
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

from common import UserError

USERS, PROCESSES, NETWORK, MOUNTS, NAME = 2**28, 2**29, 2**30, 2**17, 2**26  # unshare(2): CLONE_NEWUSER, ...
DEATH_SIGNAL = 1  # prctl(2): the signal that a process gets when its parent has ended
LEAVE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SLICE = 0.2  # seconds, in each of which a slow node wakes once
GRACE = 60.0  # seconds for the other nodes to leave after node 0
COMMANDS = ("cable", "kill", "start", "slow")
NO_RIGHTS = "this user may not make networks of its own, not even inside a namespace (try as root): "
SWITCH = """
mount --make-rprivate /
mount -t proc proc /proc
mount --bind {hosts} /etc/hosts
ip link set lo up
ip link add switch type bridge
ip link set switch addrgenmode none up
"""
CABLE = """
ip link add port{n} type veth peer name eth0 netns {pid}
ip link set port{n} addrgenmode none master switch up
{inside} ip link set lo up
{inside} ip link set eth0 addrgenmode none up
{inside} ip address add 10.0.0.{last}/24 dev eth0
tc qdisc add dev port{n} root tbf {speed}
{inside} tc qdisc add dev eth0 root tbf {speed}
"""


def missing() -> str:
    """What this machine lacks, as far as one sees it without trying; "" if nothing."""
    if sys.platform != "linux":
        return f"nodes are namespaces of Linux, and this is {sys.platform}: use a (virtual) machine with Linux"
    lacks = [tool for tool in ("ip", "tc", "mount", "nsenter") if shutil.which(tool) is None]
    return f"no {', '.join(lacks)} here: install iproute2 and util-linux" if lacks else ""


def call(name: str, *args: int):
    """A function of the C library that Python does not offer. Raises UserError."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*args) != 0:
        raise UserError(f"{NO_RIGHTS}{name}: {os.strerror(ctypes.get_errno())}")


def run_lines(lines: str):
    """Run commands, one a line. Raises UserError with what the first one says that fails."""
    for line in lines.strip().splitlines():
        done = subprocess.run(shlex.split(line), capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"{NO_RIGHTS}{line}: {done.stderr.strip()}")


def speed(gbit: float) -> str:
    """tc's token bucket. A burst: a millisecond's, if a Linux packet of 64 KiB fits; else two packets or 0.1 ms."""
    second = round(gbit * 1e9 / 8)
    burst = second // 1000 if second >= 2**16 * 1000 else max(2 * 1514, second // 10000)
    return f"rate {round(gbit * 1e6)}kbit burst {burst} limit {2**26}"


class Node:
    """A machine: its processes are those in one network namespace."""

    def __init__(self, number: int, line: list[str], gbit: float):
        """`line`: what it runs, once it has been started."""
        self.number, self.name, self.line, self.gbit, self.slowness = number, f"node{number}", line, gbit, 1.0

    def start(self):
        """Switch it on. Raises UserError."""

        def apart():
            call("unshare", NETWORK | NAME)
            socket.sethostname(self.name)

        # A terminal's Ctrl-C does not come to a session of its own: `Cluster.stop` passes it on, once.
        own: dict = dict(stdin=subprocess.PIPE, preexec_fn=apart, start_new_session=True)
        if self.number:
            said = subprocess.Popen(["sed", "-u", f"s/^/{self.name}: /"], stdin=subprocess.PIPE).stdin
            own |= dict(stdout=said, stderr=said)
        waits = f"read plugged; exec {shlex.join(self.line)} < /dev/null"
        self.process = subprocess.Popen(["sh", "-c", waits], **own)
        pid, n = self.process.pid, self.number
        self.network, enter = os.stat(f"/proc/{pid}/ns/net").st_ino, f"nsenter --target {pid} --net"
        run_lines(CABLE.format(n=n, last=n + 1, pid=pid, inside=enter, speed=speed(self.gbit)))
        self.process.stdin.write(b"\n")
        self.process.stdin.close()

    def signal(self, number: int):
        """Send a signal to each of its processes."""
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.stat(f"/proc/{pid}/ns/net").st_ino == self.network:
                    os.kill(int(pid), number)
            except OSError:  # it has just ended
                continue

    def cable(self, state: str):
        """Pull it ("off") or plug it in ("on"), at the switch. Raises UserError."""
        run_lines(f"ip link set port{self.number} {dict(off='down', on='up')[state]}")

    def kill(self):
        """First no packet leaves it any more, then its processes are gone. Raises UserError."""
        run_lines(f"ip link delete port{self.number}")
        while self.process.poll() is None:
            self.signal(signal.SIGKILL)

    def slow(self, factor: str):
        """From now on its processes run in one part of so many of the time."""
        self.signal(signal.SIGCONT)
        self.slowness = max(1.0, float(factor))

    def turn(self):
        """If it is slow: its processes run for their part of a slice."""
        if self.slowness > 1:
            self.signal(signal.SIGCONT)
            time.sleep(SLICE / self.slowness)
            self.signal(signal.SIGSTOP)


class Cluster:
    """The process that has the switch. In its own namespace it is number 1: when it ends, all others end."""

    def __init__(self, nodes: list[Node]):
        self.nodes, self.typed, self.stopped = nodes, b"", 0.0

    def run(self) -> int:
        """Start all nodes, and stay until they have ended; returns the exit status of node 0's torchrun."""
        for number in LEAVE:
            signal.signal(number, self.stop)
        for node in self.nodes:
            node.start()
        deadline = float("inf")
        while any(node.process.poll() is None for node in self.nodes) and time.monotonic() < deadline:
            self.listen(SLICE)
            for node in self.nodes:
                node.turn()
            if self.nodes[0].process.poll() is not None:
                deadline = min(deadline, time.monotonic() + GRACE)
        for node in (node for node in self.nodes if node.process.poll() is None):
            print(f"cluster: {node.name} had not ended {GRACE:g} s after node0: it is killed", flush=True)
        return abs(self.nodes[0].process.poll())  # of a signal its number

    def stop(self, *_):
        """Signal handler: torchrun of each node asks its ranks to leave. A second Ctrl-C leaves at once."""
        if self.stopped and time.monotonic() - self.stopped > 1:  # not the same one, passed on by `outside`
            os._exit(130)
        for node in self.nodes if not self.stopped else ():
            node.slow("1")
            node.process.terminate()
        self.stopped = self.stopped or time.monotonic()

    def listen(self, seconds: float):
        """For so long, or until it is done, obey what is typed."""
        if select.select([0] if self.typed is not None else [], [], [], seconds)[0]:
            heard = os.read(0, 4096)
            *lines, rest = (self.typed + heard).split(b"\n")
            self.typed = rest if heard else None
            for line in lines:
                self.obey(line.decode())

    def obey(self, line: str):
        """A command, a node's number, and perhaps a word more."""
        try:
            command, number, *more = line.split()
            getattr(self.nodes[int(number)], COMMANDS[COMMANDS.index(command)])(*more)
        except (LookupError, TypeError, ValueError, UserError) as error:
            print(f"cluster: {line}: {error}; there are {', '.join(COMMANDS)}, and a node's number", flush=True)


def inside(args: argparse.Namespace) -> int:
    """In the new namespaces: make the switch, then run the nodes."""
    call("prctl", DEATH_SIGNAL, signal.SIGKILL)
    with tempfile.NamedTemporaryFile("w", suffix=".hosts") as hosts:
        hosts.write("127.0.0.1 localhost\n" + "".join(f"10.0.0.{n + 1} node{n}\n" for n in range(args.nodes)))
        hosts.flush()
        run_lines(SWITCH.format(hosts=hosts.name))
    line = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={args.nodes}"]
    line += [f"--nproc_per_node={args.ranks_per_node}", "--rdzv_backend=c10d", "--rdzv_endpoint=node0:29500"]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return Cluster([Node(n, line + args.line, args.gbit) for n in range(args.nodes)]).run()


def outside(args: argparse.Namespace) -> int:
    """Enter new namespaces, fork the process that is number 1 there, and wait for it. Raises UserError."""
    if not args.line or not 1 <= args.nodes <= 200 or args.ranks_per_node < 1 or args.gbit <= 0:
        raise UserError("--nodes is 1 to 200, --ranks-per-node and --gbit are above 0; after them: -- step02_ddp.py")
    if lacks := missing():
        raise UserError(lacks)
    ids = dict(setgroups="deny", uid_map=f"0 {os.getuid()} 1", gid_map=f"0 {os.getgid()} 1")
    call("unshare", USERS | PROCESSES | NETWORK | MOUNTS | NAME)
    for file, text in ids.items():
        with open(f"/proc/self/{file}", "w") as target:
            target.write(text)
    if (first := os.fork()) == 0:
        return inside(args)
    for number in LEAVE:
        signal.signal(number, lambda number, _: os.kill(first, number))
    return abs(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]))


def main(argv: list[str]) -> int:
    """The command line; returns an exit status."""
    os.environ["PATH"] += ":/usr/sbin:/sbin"  # where ip and tc are, and where not everybody looks
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2, help="how many")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="processes that torchrun starts on each")
    parser.add_argument("--gbit", type=float, default=1.0, help="Gbit/s of a node's cable, each way")
    parser.add_argument("line", nargs="*", help="after `--`: the end of torchrun's line")
    try:
        return outside(parser.parse_args(argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
