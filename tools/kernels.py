"""Kernels for the chapters, forked from one process that has imported what
nearly all of them import.

A kernel of its own takes four seconds of processor time to import IPython,
torch, scipy and matplotlib; for seventy chapters that is minutes. The process
that forks has started no thread and imports nothing of the repository, so a
forked kernel is what a fresh one is after these imports. Where it cannot be had
(no Linux, a thread that some library started at its import), kernels are
started one by one, as ever.

`python tools/kernels.py FD` is that process: a line of JSON asks for a kernel,
a line answers with its process id.
"""

import atexit
import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import psutil

IMPORTED = (
    "numpy",
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "scipy.stats",
    "matplotlib.pyplot",
    "ipykernel.kernelapp",
    "ipykernel.ipkernel",
    "ipykernel.zmqshell",
)
READY = 120.0  # seconds within which the process must have imported them


# ---- the process that forks -------------------------------------------------


def become_kernel(request: dict) -> None:
    """In the forked child: environment, folder and arguments of a kernel, then
    the kernel itself.

    Does not return.
    """
    os.setsid()
    globals().pop("__file__", None)  # the main module of a kernel has none
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    import ipykernel_launcher

    sys.argv = [ipykernel_launcher.__file__, *request["arguments"]]
    known = set(sys.path)
    sys.path[:0] = [
        p
        for p in request["env"].get("PYTHONPATH", "").split(os.pathsep)
        if p and p not in known
    ]
    from ipykernel import kernelapp

    kernelapp.launch_new_instance()


def serve(connection: socket.socket) -> None:
    "Fork a kernel for each request, until the other end is closed."
    # read when ipykernel is imported: kernels end when this process has ended
    os.environ["JPY_PARENT_PID"] = str(os.getpid())
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            __import__(name)
    threads = len(os.listdir("/proc/self/task"))
    # nobody waits for the children here
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    lines = connection.makefile("rw", encoding="utf-8")
    print(json.dumps({"threads": threads}), file=lines, flush=True)
    for line in lines:
        pid = os.fork()
        if not pid:
            status = 1
            try:
                lines.detach()
                connection.close()
                become_kernel(json.loads(line))
                status = 0
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        print(json.dumps({"pid": pid}), file=lines, flush=True)


# ---- the side that asks -----------------------------------------------------


class Forked(psutil.Process):
    "A kernel's process, with what jupyter_client uses of `subprocess.Popen`."

    stdin = stdout = stderr = None

    def poll(self) -> int | None:
        "0 once the process has ended, however it did; None while it runs."
        return None if self.is_running() else 0

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            super().send_signal(number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The process that forks, seen from here.

    `kernel` may be called from several threads.
    """

    def __init__(self, env: dict[str, str]):
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={
                    **env,
                    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
                },
                start_new_session=True,
            )
        self.connection, self.lines, self.lock = (
            ours,
            ours.makefile("rw", encoding="utf-8"),
            threading.Lock(),
        )
        ours.settimeout(READY)
        try:
            self.threads = json.loads(self.lines.readline() or "{}").get(
                "threads", 0
            )
        except OSError:  # not ready in time
            self.threads = 0
        ours.settimeout(None)

    def kernel(
        self, arguments: list[str], env: dict[str, str], cwd: str
    ) -> Forked:
        with self.lock:
            print(
                json.dumps({"arguments": arguments, "env": env, "cwd": cwd}),
                file=self.lines,
                flush=True,
            )
            return Forked(json.loads(self.lines.readline())["pid"])

    def close(self) -> None:
        """End the process that forks; kernels that still run end when they
        notice.
        """
        with contextlib.suppress(OSError):
            self.lines.close()
        self.connection.close()
        self.process.terminate()
        self.process.wait()


@contextlib.contextmanager
def nursery(env: dict[str, str]):
    """A `Nursery`, or None where kernels cannot be forked: then each is started
    on its own.
    """
    if sys.platform != "linux":
        yield None
        return
    started = Nursery(env)
    try:
        yield started if started.threads == 1 else None
    finally:
        started.close()


def manager(parent: Nursery | None):
    """A kernel manager for nbclient whose kernels are forked from `parent`;
    started one by one where it is None.
    """
    from jupyter_client import AsyncKernelManager
    from jupyter_client.provisioning.local_provisioner import LocalProvisioner

    class Provisioner(LocalProvisioner):
        async def launch_kernel(self, cmd, **kwargs):
            arguments = cmd[cmd.index("-f") :]
            try:
                self.process = parent.kernel(
                    arguments,
                    {k: str(v) for k, v in kwargs["env"].items()},
                    str(kwargs["cwd"]),
                )
            except (OSError, ValueError, psutil.NoSuchProcess):
                # the process that forks has died, for want of memory perhaps
                return await super().launch_kernel(cmd, **kwargs)
            self.pid = self.pgid = self.process.pid
            self.cwd = kwargs["cwd"]
            return self.connection_info

    made = AsyncKernelManager(kernel_name="python3")
    if parent:
        made.provisioner = Provisioner(
            kernel_id="", kernel_spec=made.kernel_spec, parent=made
        )
    return made


if __name__ == "__main__":
    del sys.path[0]  # this folder
    serve(socket.socket(fileno=int(sys.argv[1])))
