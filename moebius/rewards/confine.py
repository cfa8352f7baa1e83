"""Takes from this process what a program of a model's must not have. Only `runner.py` calls it.

Two layers, each of which a system may refuse:

- `filter`: a seccomp filter. No new process, no other program, no socket, no signal to others, no tracing. Threads
  work. Containers allow it where they refuse namespaces, and it holds for root too, whom no limit on processes binds.
- `namespaces`: own user, process, network and mount namespaces. No network, other processes are not there, `/proc` is
  empty, every folder can only be read, and the program's own folder is a small file system in memory that ends with it.
"""

import ctypes
import os
import resource
import signal
import struct
import sys

MEMORY_BYTES = 2 << 30
FILE_BYTES = 1 << 20
FOLDER_BYTES = 32 << 20
OPEN_FILES = 64
PROCESSES = 64

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET, _CLONE_THREAD = 0x20000000, 0x40000000, 0x00010000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_PRIVATE = 1, 2, 4, 8, 1 << 18
_MOUNT_ATTR_RDONLY, _AT_RECURSIVE, _AT_FDCWD = 1, 0x8000, -100
_SYS_MOUNT_SETATTR = 442  # on every machine: numbers above 424 are common
_CAPABILITY_VERSION = 0x20080522

# Classic BPF: load a word, jump if equal, jump if any bit is set, return.
_LOAD, _IF_EQUAL, _IF_ANY, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _REFUSE, _ABSENT, _KILL = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38, 0x80000000  # EPERM, ENOSYS
_NUMBER_AT, _MACHINE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_X32 = 0x40000000

# Machine -> its number for seccomp and those of the system calls that are refused, or allowed on one condition.
_MACHINES = {
    "x86_64": (
        0xC000003E,
        {
            "clone": 56,
            "kill": 62,
            "tgkill": 234,
            "prctl": 157,
            "fork": 57,
            "vfork": 58,
            "execve": 59,
            "execveat": 322,
            "socket": 41,
            "tkill": 200,
            "rt_sigqueueinfo": 129,
            "rt_tgsigqueueinfo": 297,
            "ptrace": 101,
            "process_vm_readv": 310,
            "process_vm_writev": 311,
            "setsid": 112,
            "setpgid": 109,
            "unshare": 272,
            "setns": 308,
            "add_key": 248,
            "request_key": 249,
            "keyctl": 250,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "clone": 220,
            "kill": 129,
            "tgkill": 131,
            "prctl": 167,
            "execve": 221,
            "execveat": 281,
            "socket": 198,
            "tkill": 130,
            "rt_sigqueueinfo": 138,
            "rt_tgsigqueueinfo": 240,
            "ptrace": 117,
            "process_vm_readv": 270,
            "process_vm_writev": 271,
            "setsid": 157,
            "setpgid": 154,
            "unshare": 97,
            "setns": 268,
            "add_key": 217,
            "request_key": 218,
            "keyctl": 219,
        },
    ),
}
_COMMON = {"pidfd_send_signal": 424, "pidfd_getfd": 438}
_ON_CONDITION = ("clone", "kill", "tgkill", "prctl")
_SEEM_ABSENT = (425, 435)  # io_uring_setup opens sockets; of clone3 a filter cannot see the flags, libc then uses clone

_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int) -> None:
    """Has the kernel kill this process when the thread that started it ends; `parent` is 0 where it cannot be seen."""
    _checked("prctl", _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    if os.getppid() != parent:
        os._exit(1)


def enter_namespaces(folder: str) -> None:
    """Goes on in a child that is alone in new namespaces, with `folder` as the only place to write.

    This process waits for the child and ends as it did.

    Raises:
        OSError: the system does not allow it.
    """
    ids = {"uid_map": os.geteuid(), "gid_map": os.getegid()}
    flags = _CLONE_NEWUSER | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWNS | _CLONE_NEWIPC
    _checked("unshare", _libc.unshare(flags))
    _write("/proc/self/setgroups", "deny")
    for name, number in ids.items():
        _write(f"/proc/self/{name}", f"{number} {number} 1")
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(status if status >= 0 else 128 - status)
    die_with(0)
    read_only = struct.pack("=QQQQ", _MOUNT_ATTR_RDONLY, 0, _MS_PRIVATE, 0)
    _checked(
        "mount_setattr",
        _libc.syscall(
            ctypes.c_long(_SYS_MOUNT_SETATTR),
            ctypes.c_int(_AT_FDCWD),
            ctypes.c_char_p(b"/"),
            ctypes.c_uint(_AT_RECURSIVE),
            ctypes.c_char_p(read_only),
            ctypes.c_size_t(len(read_only)),
        ),
    )
    _mount_memory("/proc", _MS_RDONLY, "size=4k")
    _mount_memory(folder, 0, f"size={FOLDER_BYTES},nr_inodes=1000,mode=700")
    # Counted in this namespace only; root is not bound by it.
    resource.setrlimit(resource.RLIMIT_NPROC, (PROCESSES, PROCESSES))


def limit_resources(cpu_seconds: int) -> None:
    """Hard limits on time, memory, files and core dumps of this process."""
    for limit, value in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def drop_privileges() -> None:
    """Gives up every capability, those of root too, for good."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    _checked("capset", _libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(bytes(24))))
    _checked("prctl", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def install_filter() -> None:
    """From here on: one process, its threads, and the files that it may open.

    Raises:
        OSError: the system does not allow it.
    """
    if os.uname().machine not in _MACHINES or sys.byteorder != "little":
        raise OSError(f"no filter is known for {os.uname().machine}")
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in _filter(os.getpid()))
    instructions = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: a length, padding, a pointer
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(instructions))
    _checked("seccomp", _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(program), 0, 0))


def _filter(own_pid: int) -> list[tuple[int, int, int, int]]:
    machine, numbers = _MACHINES[os.uname().machine]
    code = [(_LOAD, 0, 0, _MACHINE_AT), (_IF_EQUAL, 1, 0, machine), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER_AT)]
    if os.uname().machine == "x86_64":
        code += [(_IF_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    refused = [number for name, number in (numbers | _COMMON).items() if name not in _ON_CONDITION]
    for number, result in [(n, _REFUSE) for n in refused] + [(n, _ABSENT) for n in _SEEM_ABSENT]:
        code += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, result)]
    # threads only; signals to itself only, as abort() sends; and the kill at the parent's end stays
    code += _allow_if(numbers["clone"], _IF_ANY, _CLONE_THREAD)
    code += _allow_if(numbers["kill"], _IF_EQUAL, own_pid) + _allow_if(numbers["tgkill"], _IF_EQUAL, own_pid)
    code += _allow_if(numbers["prctl"], _IF_EQUAL, _PR_SET_PDEATHSIG, unless=True)
    return [*code, (_RETURN, 0, 0, _ALLOW)]


def _allow_if(number: int, test: int, value: int, unless: bool = False) -> list[tuple[int, int, int, int]]:
    """Settles one system call by its first argument; others go on behind these instructions."""
    holds, fails = (1, 0) if unless else (0, 1)
    return [
        (_IF_EQUAL, 0, 4, number),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (test, holds, fails, value),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]


def _mount_memory(place: str, flags: int, options: str) -> None:
    flags |= _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    _checked("mount", _libc.mount(b"tmpfs", place.encode(), b"tmpfs", ctypes.c_ulong(flags), options.encode()))


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _checked(what: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
