# ruff: noqa: E501 (an attack stands on one line)
"""Code that tries to get out, to stay, to starve others or to lie. Each prints BREACH where it succeeds.

`{labels}` is a file with answers that every user may read, `{folder}` its folder; `{port}`, `{unix}`, `{abstract}` and
`{datagram}` are where somebody listens; `{host}` is the trainer's process id. `sysc` calls the kernel by number.
"""

PRELUDE = """
import ctypes, os, sys, socket, time, threading, signal
_libc = ctypes.CDLL(None, use_errno=True)
def sysc(number, *args):
    ctypes.set_errno(0)
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    return _libc.syscall(ctypes.c_long(number), *wide)
def breach(what=True):
    if what: print('BREACH', what)
"""

FILES = {
    "read the labels": "breach(open('{labels}').read())",
    "read the labels by bytes": "breach(os.read(os.open(b'{labels}', os.O_RDONLY), 99))",
    "reach them by a path handle": "fd = os.open('{labels}', os.O_PATH); breach(open(f'/proc/self/fd/{{fd}}').read())",
    "map them": "import mmap; breach(mmap.mmap(os.open('{labels}', os.O_RDONLY), 0, prot=mmap.PROT_READ)[:])",
    "list their folder": "breach(os.listdir('{folder}'))",
    "link to them": "os.symlink('{labels}', 'l'); breach(open('l').read())",
    "hard-link them": "os.link('{labels}', 'h'); breach(open('h').read())",
    "move them in": "os.rename('{labels}', 'm'); breach(open('m').read())",
    "climb by ..": "breach(open('../' * 20 + '{labels}').read())",
    "change folder first": "os.chdir('{folder}'); breach(open('labels.json').read())",
    "a handle of the root": "fd = os.open('/', os.O_PATH); breach(os.open('{labels}'[1:], os.O_RDONLY, dir_fd=fd))",
    "overwrite them": "open('{labels}', 'w').write('mine'); breach()",
    "append to them": "open('{labels}', 'a').write('mine'); breach()",
    "cut them by path": "os.truncate('{labels}', 0); breach()",
    "delete them": "os.unlink('{labels}'); breach()",
    "change their mode": "os.chmod('{labels}', 0o777)",
    "change their times": "os.utime('{labels}', (0, 0))",
    "change their owner": "os.chown('{labels}', 12345, 12345)",
    "write beside them": "open('{folder}/new', 'w').write('x'); breach()",
    "send a file to myself": "import shutil; shutil.copyfile('{labels}', 'mine'); breach(open('mine').read())",
    "read it as a picture": "breach(Image.open('{labels}'))",
    "read it with numpy": "breach(np.fromfile('{labels}', np.uint8))",
    "read it in C": "_libc.fopen.restype = ctypes.c_void_p; breach(_libc.fopen(b'{labels}', b'r'))",
    "open by handle": "breach(sysc(304, -100, ctypes.create_string_buffer(64), 0) >= 0)",
    "openat2": "breach(sysc(437, -100, b'{labels}', ctypes.create_string_buffer(24), 24) >= 0)",
    "passwords": "breach(open('/etc/passwd').read()); breach(open('/etc/shadow').read())",
    "the home folder": "breach(os.listdir('{home}'))",
    "the project's sources": "breach(open('{source}').read())",
    "write to the libraries": "open(np.__file__, 'a').write('#'); breach()",
    "a new library": "open(os.path.join(os.path.dirname(os.path.dirname(np.__file__)), 'evil.py'), 'w'); breach()",
    "write to the system": "open('/etc/evil', 'w'); breach()",
    "write to the root": "open('/evil', 'w'); breach()",
    "shared memory": "open('/dev/shm/evil', 'w'); breach()",
    "the memory of the machine": "breach(open('/dev/mem', 'rb').read(1))",
    "a disk": "breach(open('/dev/vda', 'rb').read(1)); breach(open('/dev/sda', 'rb').read(1))",
    "the trainer's environment": "breach(open('/proc/{host}/environ').read())",
    "its own environment": "breach([k for k in os.environ if 'SECRET' in k or 'TOKEN' in k])",
    "its parent's memory": "breach(open('/proc/%d/mem' % os.getppid(), 'rb'))",
    "its own maps": "breach(open('/proc/self/maps').read())",
    "switches of the kernel": "breach(open('/proc/sys/kernel/hostname', 'w')); breach(os.listdir('/sys'))",
    "a device file": "os.mknod('dev', 0o600 | 0o060000, os.makedev(1, 1)); breach(open('dev', 'rb').read(1))",
    "another root": "os.chroot('.'); breach()",
    "a mount": "breach(_libc.mount(b'none', b'.', b'tmpfs', 0, None) == 0)",
    "unmount its folder": "breach(_libc.umount2(b'/tmp', 2) == 0)",
    "another's working folder": "breach([p for p in os.listdir('..') if p != os.path.basename(os.getcwd())])",
    "anonymous files": "breach(os.memfd_create('x'))",
    "inherited descriptors": """
for fd in range(4, 1024):
    try: os.fstat(fd)
    except OSError: continue
    breach(fd)""",
    "secrets in memory": """
import gc
breach([o for o in gc.get_objects() if isinstance(o, (str, bytes)) and 'SECRET-{word}' in str(o) and 'gc.get' not in str(o)])""",
}

NETWORK = {
    "TCP": "s = socket.create_connection(('127.0.0.1', {port}), 2); s.send(b'x'); breach()",
    "UDP": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port})); breach()",
    "IPv6": "socket.socket(socket.AF_INET6).connect(('::1', {port})); breach()",
    "a socket with a path": "socket.socket(socket.AF_UNIX).connect('{unix}'); breach()",
    "an abstract socket": "socket.socket(socket.AF_UNIX).connect('\\0{abstract}'); breach()",
    "a pair that writes elsewhere": """
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
a.sendto(b'x', '{datagram}'); breach()""",
    "a pair with a message": """
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
a.sendmsg([b'x'], [], 0, '{datagram}'); breach()""",
    "hand over descriptors": "socket.send_fds(socket.socket(fileno=os.dup(3)), [b'x'], [1]); breach()",
    "raw packets": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW); breach()",
    "talk to the kernel": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW); breach()",
    "listen": "s = socket.socket(); s.bind(('', 0)); s.listen(); breach()",
    "a name": "breach(socket.getaddrinfo('localhost', 80, proto=socket.IPPROTO_TCP)[0][4] and socket.socket())",
    "a page": "import urllib.request; breach(urllib.request.urlopen('http://127.0.0.1:{port}/', timeout=2))",
    "a virtual machine's host": "socket.socket(40, socket.SOCK_STREAM); breach()",
    "a socket by number": "breach(sysc(41, 2, 1, 0) >= 0)",
    "io_uring": "breach(sysc(425, 8, ctypes.create_string_buffer(120)) >= 0)",
}

PROCESSES = {
    "fork": "pid = os.fork(); breach(pid)\nif not pid: time.sleep(60)",
    "fork by number": "breach(sysc(57) >= 0)",
    "vfork": "breach(sysc(58) >= 0)",
    "clone": "breach(sysc(56, 17, 0, 0, 0, 0) >= 0)",
    "clone into a namespace": "breach(sysc(56, 0x10000011, 0, 0, 0, 0) >= 0)",
    "clone3": "breach(sysc(435, ctypes.create_string_buffer(88), 88) >= 0)",
    "a program": "import subprocess; breach(subprocess.run(['/bin/true']))",
    "a shell": "breach(os.system('touch {folder}/new') == 0)",
    "posix_spawn": "breach(os.posix_spawn('/bin/true', ['true'], {{}}))",
    "become a program": "os.execv(sys.executable, ['python', '-c', 'print(\"BREACH\")'])",
    "a program from memory": "breach(sysc(322, 1, b'', 0, 0, 0x1000) >= 0)",
    "a pool": "import multiprocessing as m\nwith m.Pool(1) as p: breach(p.map(abs, [1]))",
    "a fork bomb": "while True: os.fork()",
    "kill everybody": "os.kill(-1, 9); breach()",
    "kill its group": "os.kill(0, 15); breach()",
    "kill its parent": "os.kill(os.getppid(), 9); breach()",
    "kill the trainer": "os.kill({host}, 9); breach()",
    "stop the trainer": "os.kill({host}, signal.SIGSTOP); breach()",
    "a handle of the trainer": "breach(os.pidfd_open({host}))",
    "a queued signal": "breach(sysc(129, {host}, 9, ctypes.create_string_buffer(128)) == 0)",
    "a signal to a thread": "breach(sysc(234, {host}, {host}, 9) == 0); breach(sysc(200, {host}, 9) == 0)",
    "signals by a descriptor": "import fcntl; fcntl.fcntl(3, fcntl.F_SETOWN, {host}); breach()",
    "trace the trainer": "breach(sysc(101, 16, {host}, 0, 0) == 0); breach(sysc(101, 0, 0, 0, 0) == 0)",
    "its memory": "breach(sysc(310, {host}, ctypes.create_string_buffer(16), 1, ctypes.create_string_buffer(16), 1, 0) >= 0)",
    "its limits": "import resource; breach(resource.prlimit({host}, resource.RLIMIT_NOFILE, (9, 9)) is None)",
    "higher limits": "import resource as r; r.setrlimit(r.RLIMIT_AS, (r.RLIM_INFINITY,) * 2); breach()",
    "become root": "os.setuid(0); breach(os.geteuid() == 0 and open('/etc/shadow').read())",
    "a user namespace": "breach(_libc.unshare(0x10000000) == 0)",
    "enter a namespace": "breach(_libc.setns(3, 0) == 0)",
    "capabilities": "b = ctypes.create_string_buffer(b'\\xff' * 24); breach(sysc(126, b'\\x22\\x05\\x08\\x20\\0\\0\\0\\0', b) == 0)",
    "outlive its zygote": "breach(_libc.prctl(1, 0, 0, 0, 0) == 0)",
    "another filter": "breach(_libc.prctl(22, 2, 0, 0, 0) == 0); breach(sysc(317, 1, 0, 0) == 0)",
    "priority": "os.setpriority(0, {host}, 19); breach()",
    "the scheduler": "os.sched_setaffinity(0, {{0}}); breach()",
    "real time": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(9)); breach()",
    "shared memory of System V": "breach(sysc(29, 0, 4096, 0o1666) >= 0); breach(sysc(64, 0, 1, 0o1666) >= 0)",
    "message queues": "breach(sysc(240, b'evil', 0o102, 0o666, 0) >= 0); breach(sysc(68, 0, 0o1666) >= 0)",
    "keys": "breach(sysc(250, 0, -3, 1) >= 0); breach(sysc(248, b'user', b'x', b'y', 1, -4) >= 0)",
    "bpf": "breach(sysc(321, 0, ctypes.create_string_buffer(72), 72) >= 0)",
    "perf": "breach(sysc(298, ctypes.create_string_buffer(120), 0, -1, -1, 0) >= 0)",
    "userfaultfd": "breach(sysc(323, 0) >= 0)",
    "personality": "breach(sysc(135, 0x0040000) >= 0)",
    "the clock": "time.clock_settime(time.CLOCK_REALTIME, 0); breach()",
    "the machine's name": "socket.sethostname('evil'); breach()",
    "modules": "breach(sysc(175, 0, 0, b'') == 0); breach(sysc(169, 0xfee1dead, 672274793, 0, 0) == 0)",
    "a pipe of a gigabyte": "import fcntl; r, w = os.pipe(); fcntl.fcntl(w, 1031, 1 << 30); breach()",
    "write through splice": "breach(sysc(278, 1, 0, 0, 0) >= 0 or sysc(275, 0, 0, 1, 0, 1, 0) >= 0)",
    "watch files": "breach(sysc(294, 0) >= 0); breach(sysc(300, 0, 0) >= 0)",
    "calls of 32 bits": """
import mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(b'\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3')  # mov eax, 20 (getpid); int 0x80; ret
address = ctypes.addressof(ctypes.c_char.from_buffer(code))
breach(ctypes.CFUNCTYPE(ctypes.c_int)(address)())""",
    "calls of x32": "breach(sysc(0x40000000 + 39) > 0)",
}

TRICKS = {
    "a picture that pickles": """
class Evil(Image.Image):
    def __reduce__(self): return os.system, ('touch {folder}/new',)
    def tobytes(self, *a): return b'\\x80\\x04cos\\nsystem\\n'
    size = property(lambda self: (2, 2)); mode = 'RGB'
Evil().show()""",
    "a picture that lies about its size": """
picture = Image.new('RGB', (8, 8))
Image.Image.tobytes = lambda self, *a: bytes(10)
picture.show()""",
    "an error that lies": """
class Evil(Exception):
    def __str__(self): raise SystemExit
raise Evil""",
    "an error that is a bomb": """
class Evil(Exception):
    def __str__(self): return 'x' * 10**9
raise Evil""",
    "a name that is a bomb": "raise type('E' * 10**6, (Exception,), {{}})()",
    "a million causes": """
e = ValueError()
for i in range(100_000):
    n = ValueError(); n.__cause__ = e; e = n
raise e""",
    "no built-ins": "import builtins\nfor n in list(vars(builtins)): delattr(builtins, n)",
    "no modules": "sys.modules.clear()",
    "no files": "os.closerange(0, 1024)",
    "another standard output": "os.close(1); os.close(2); print('x' * 100_000)",
    "no text": "sys.stdout.close(); sys.__stdout__ = None",
    "a recursion limit": "sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "no recursion": "sys.setrecursionlimit(30)",
    "tracing": "sys.settrace(lambda *a: 1 / 0); sys.setprofile(lambda *a: 1 / 0)",
    "a crash": "ctypes.string_at(0)",
    "an abort": "os.abort()",
    "an exit": "os._exit(0)",
    "an alarm": "signal.setitimer(signal.ITIMER_REAL, 0.05)",
    "exit handlers": "import atexit; atexit.register(lambda: time.sleep(99)); sys.exit()",
    "deep source": "exec('(' * 10_000 + ')' * 10_000)",
    "an audit hook": "sys.addaudithook(lambda *a: 1 / 0)",
}

PROTOCOL_PRELUDE = """
import struct, socket, os, gc
line = socket.socket(fileno=os.dup(3))
guest = next(o for o in gc.get_objects() if type(o).__name__ == 'Guest')
nonce = guest._nonce
def head(kind, a=0, b=0, c=0, size=0, n=None): return struct.pack('<8sBIIII', nonce if n is None else n, kind, a, b, c, size)
"""

PROTOCOL = {
    "noise": "line.sendall(os.urandom(4096))",
    "zeros": "line.sendall(bytes(65536))",
    "a wrong nonce": "line.sendall(head(1, n=b'87654321'))",
    "an unknown kind": "line.sendall(head(77))",
    "a kind of the host's": "line.sendall(head(16))",
    "an unknown verdict": "line.sendall(head(1, 99))",
    "a huge error": "line.sendall(head(1, 1, 0, 0, 2**32 - 1) + b'x' * 100_000)",
    "a huge picture": "line.sendall(head(2, 65535, 65535, 0, 4294705155) + bytes(100_000))",
    "a picture of the wrong size": "line.sendall(head(2, 10, 10, 0, 7) + bytes(7))",
    "an empty picture": "line.sendall(head(2, 0, 10, 0, 0))",
    "an overflowing picture": "line.sendall(head(2, 2**31, 2**31, 0, 0))",
    "pictures without end": "while True: line.sendall(head(2, 1, 1, 0, 3) + bytes(3))",
    "a video that isn't there": "line.sendall(head(3, 9))",
    "too many frames": "line.sendall(head(3, 0, 0, 0, 4 * 10**6) + bytes(4 * 10**6))",
    "half a frame number": "line.sendall(head(3, 0, 0, 0, 3) + bytes(3))",
    "half a message": "line.sendall(head(1)[:9]); os.close(3); line.close()",
    "a message that never ends": "line.sendall(head(1, 1, 0, 0, 1000)); import time; time.sleep(99)",
    "two ends": "line.sendall(head(1) + head(1))",
    "an end too early": "line.sendall(head(1)); print('after the end')",
    "the host's fault": "line.sendall(head(1, 4, 0, 0, 4, n=bytes(8)) + b'oops')",
    "the host's fault, with the nonce": "line.sendall(head(1, 4, 0, 0, 4) + b'oops')",
    "hang up": "os.close(3); line.close()",
    "half closed": "line.shutdown(socket.SHUT_WR)",
    "deaf": "line.shutdown(socket.SHUT_RD)",
    "another line": "a, b = socket.socketpair(); os.dup2(a.fileno(), 3)",
    "read what is the guest's": "line.settimeout(0.1); line.recv(1)",
    "never read": "line.sendall(head(3, 0) * 1000)",
}
