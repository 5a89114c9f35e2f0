# ruff: noqa: E501 (an attack stands on one line)
"""More attacks: by rarely used kernel features, by resources that workers share, and against the worker itself.

The names and conventions are those of attacks.py.
"""

# More bytes than the limit (64 MiB) in files that no folder lists, kept until the end of the call.
UNLINKED = """
import os, time
held = [os.open(f"f{n}", os.O_CREAT | os.O_RDWR) for n in range(9)]
for n, fd in enumerate(held): os.write(fd, bytes(16 << 20)); os.unlink(f"f{n}")
time.sleep(99)"""

CORNERS = {
    "other processes": """
def succeeds(query, *args):
    try: query(*args); return True
    except OSError: return False
queries = (os.getpgid, os.getsid, os.sched_getaffinity, os.sched_getscheduler, os.sched_getparam, lambda p: os.getpriority(0, p), lambda p: os.kill(p, 0))
breach([p for p in (*range(1, 999), {host}) if p != os.getpid() and any(succeeds(query, p) for query in queries)])""",
    "who else has capabilities": "h=ctypes.create_string_buffer(b'\\x22\\x05\\x08\\x20'+(1).to_bytes(4,'little')); breach(sysc(125,h,ctypes.create_string_buffer(24))==0)",
    "another's locks": "p=ctypes.create_string_buffer(8); breach(sysc(274,{host},p,ctypes.create_string_buffer(8))==0)",
    "out of band": "a,b=socket.socketpair(); a.send(b'x', socket.MSG_OOB); breach()",
    "out of band, to the host": "socket.socket(fileno=os.dup(3)).send(b'x', socket.MSG_OOB); breach()",
    "receive out of band": "a,b=socket.socketpair(); a.send(b'xy'); b.recv(1, socket.MSG_OOB | socket.MSG_DONTWAIT); breach()",
    "a whiteout": "import stat; open('a','w').close(); r=sysc(316,-100,b'a',-100,b'b',4); breach(r==0 and stat.S_ISCHR(os.lstat('a').st_mode) and open('a','rb').read(1))",
    "machine code of its own": """
import mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(b'\\xb8\\x29\\x00\\x00\\x00\\xbf\\x02\\x00\\x00\\x00\\xbe\\x01\\x00\\x00\\x00\\x31\\xd2\\x0f\\x05\\xc3')  # socket(2, 1, 0)
breach(ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(code)))() >= 0)""",
    "a page at zero": "breach(sysc(9, 0, 4096, 7, 0x32, -1, 0) == 0)",
    "memory that isn't reserved": "_libc.syscall.restype=ctypes.c_long; breach(sysc(9, 0, 1<<40, 3, 0x4022, -1, 0) > 0)",
    "memory by brk": "_libc.sbrk.restype=ctypes.c_void_p; breach(_libc.sbrk(ctypes.c_long(1<<38)) not in (None, 2**64-1))",
    "a stack of a terabyte": "threading.stack_size(1<<40); t=threading.Thread(target=int); t.start(); breach()",
    "timers without number": "n=0\nwhile n < 5000 and sysc(222, 1, None, ctypes.create_string_buffer(8)) == 0: n += 1\nbreach(n if n >= 5000 else 0)",
    "the trainer's root": "breach(os.listdir('/proc/{host}/root'))",
    "the first process's folder": "breach(os.listdir('/proc/1/cwd'))",
    "the trainer's descriptors": "breach(open('/proc/{host}/fd/0', 'rb'))",
    "threads of the trainer": "breach(os.listdir('/proc/{host}/task'))",
    "a lease": "import fcntl; open('a','w').close(); fd=os.open('a', os.O_RDONLY); fcntl.fcntl(fd, 1024, 1); breach()",
    "another signal for a file": "import fcntl; fcntl.fcntl(3, 10, 9); breach()",
    "news of a socket": "import fcntl; fcntl.ioctl(3, 0x5452, (1).to_bytes(4,'little')); breach()",
    "a folder that can't be changed": "import fcntl; fd=os.open('.', os.O_RDONLY); fcntl.ioctl(fd, 0x40086602, (0x10).to_bytes(8,'little')); breach()",
    "a copy on write": "import fcntl; open('a','w').write('x'*9999); b=open('b','w'); fcntl.ioctl(b.fileno(), 0x40049409, os.open('a', os.O_RDONLY)); breach()",
    "where memory lies": "breach(sysc(238, 2, ctypes.create_string_buffer(8), 64)==0); breach(sysc(237, 0, 4096, 2, None, 0, 0)==0); breach(sysc(279, {host}, 1, ctypes.create_string_buffer(8), None, ctypes.create_string_buffer(8), 0)==0)",
    "memory of the dying": "breach(sysc(448, 3, 0)==0); breach(sysc(453, 0, 4096, 0)>0)",
    "a tracer of its choice": "breach(_libc.prctl(0x59616d61, ctypes.c_ulong(-1), 0, 0, 0)==0)",
    "its own memory map": "breach(_libc.prctl(35, 1, 0x1000, 0, 0)==0); breach(_libc.prctl(62, 1, 0, 0, 0)==0); breach(_libc.prctl(57, 1, 0, 0, 0)==0)",
    "a pipe with a name": "os.mkfifo('p'); breach()",
    "a socket with a name of its own": "s=socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0]; s.bind('s'); breach()",
    "more processors": "os.sched_setaffinity(0, range(os.cpu_count())); breach()",
    "a lower oom score": "open('/proc/self/oom_score_adj','w').write('-1000'); breach()",
    "a fuller dump": "breach(os.open('/proc/self/coredump_filter', os.O_WRONLY))",
    "groups of processes": "os.makedirs('/sys/fs/cgroup/mine'); breach()",
    "names that are no text": """
os.mkdir(b'\\xff\\xfe'); os.mkdir(b'a\\nb'); os.mkdir('x' * 255); os.symlink('/' * 4000, 'l'); open(b'\\xff\\xfe/\\x80', 'w').write('x' * 9999)
os.rename('x' * 255, '\\udcff'); os.symlink('.', 'round'); os.chdir('round/round/round')""",
    "links without number": "open('a','w').close()\nfor n in range(10**6): os.link('a', str(n))",
    "links that are long": "for n in range(10**6): os.symlink('x' * 4000, str(n))",
    "a table of descriptors for a thread": "breach(sysc(436, 3000, 3001, 2) == 0); breach(sysc(436, 3000, 3001, 6) == 0)",
    "a thread with a table of descriptors": """
stack = ctypes.create_string_buffer(65536)
entry, top = ctypes.cast(_libc.pause, ctypes.c_void_p), ctypes.c_void_p((ctypes.addressof(stack) + 65000) & ~15)
breach([hex(flags) for flags in (0x10b00, 0x10d00, 0x11f00, 0x18f00) if _libc.clone(entry, top, flags, None) > 0])""",
    "a file cut out of another": "f=open('a','wb'); f.write(b'x'*9999); f.flush(); breach(sysc(285, f.fileno(), 0, 0, 1<<40) == 0)",
}

# Ways to notice what other processes do; added to the corners, since each must fail.
CORNERS |= {
    "clocks of other processes": """
ids = [(~pid << 3) | kind for pid in (*range(1, 999), {host}) for kind in (0, 1, 2) if pid != os.getpid()]
breach([clock for clock in ids for call in (228, 229) if sysc(call, clock, ctypes.create_string_buffer(16)) == 0])""",
    "what the page cache holds": """
import mmap
fd = os.open(np.__file__, os.O_RDONLY)
address = np.frombuffer(mmap.mmap(fd, 4096, prot=mmap.PROT_READ), np.uint8).ctypes.data
breach(sysc(27, address, 4096, ctypes.create_string_buffer(1)) == 0); breach(sysc(28, address, 4096, 21) == 0)
breach(os.preadv(fd, [bytearray(4096)], 0, os.RWF_NOWAIT))""",
    "waits at a word of a file": """
import mmap
word = np.frombuffer(mmap.mmap(os.open(np.__file__, os.O_RDONLY), 4096, prot=mmap.PROT_READ), np.uint8)
address, value = word.ctypes.data, int.from_bytes(word[:4].tobytes(), 'little')
second = ctypes.create_string_buffer(bytes([1] + [0] * 15))
breach([command for command in (0, 9, 11, 0x109) if sysc(202, address, command, value, second, 0, 1) == 0 or ctypes.get_errno() != 11])""",
    "how busy the machine is": "breach(sysc(99, ctypes.create_string_buffer(128)) == 0)",
}

HABITS = {
    "another compile": "import builtins; builtins.compile = builtins.exec = builtins.open = lambda *a, **k: 1 / 0",
    "stdout in another encoding": "sys.stdout.reconfigure(encoding='utf-16', errors='strict', newline='\\r\\n')",
    "stdout methods replaced": "sys.stdout.write = lambda *a: None; sys.stdout.flush = lambda: 1 / 0",
    "stdout detached": "sys.stdout.detach()",
    "another text wrapper": "import io; sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding='utf-8'); print('x')",
    "a thread that keeps the GIL": """
sys.setswitchinterval(10**6)
def f():
    while True: pass
threading.Thread(target=f, daemon=True).start()""",
    "threads that spin": """
def f():
    while True: sum(range(999))
for _ in range(8): threading.Thread(target=f, daemon=True).start()""",
    "a worker that doesn't run code": "type(find_worker())._run_cell = lambda self, code: None",
    "a thread that reads the socket": """
line = socket.socket(fileno=os.dup(3))
def f():
    while True: line.recv(1)
threading.Thread(target=f, daemon=True).start()""",
    "a thread that writes to the socket": """
line = socket.socket(fileno=os.dup(3))
def f():
    while True: time.sleep(0.001); line.send(b'x')
threading.Thread(target=f, daemon=True).start()""",
    "a timer that kills": """
event = ctypes.create_string_buffer((0).to_bytes(8, 'little') + (9).to_bytes(4, 'little') + (0).to_bytes(52, 'little'), 64)
timer = ctypes.create_string_buffer(8)
sysc(222, 1, event, timer); sysc(223, int.from_bytes(timer.raw[:4], 'little'), 0, ctypes.create_string_buffer(bytes(16) + (0).to_bytes(8, 'little') + (10**7).to_bytes(8, 'little'), 32), None); time.sleep(0.001)""",
    "no cpuid": "sysc(158, 0x1012, 0); np.linalg.inv(np.eye(50))",
    "a circular robust list": """
ring = ctypes.create_string_buffer(24); address = ctypes.addressof(ring)
ring.raw = address.to_bytes(8, 'little') + bytes(16)
def f(): sysc(273, ring, 24)
t = threading.Thread(target=f); t.start(); t.join()""",
    "an unmapped signal stack": "sysc(131, ctypes.create_string_buffer((4096).to_bytes(8,'little') + bytes(8) + (65536).to_bytes(8,'little'), 24), None)\nwhile True: pass",
    "unmapped memory": "_libc.munmap(ctypes.c_void_p(id(None) & ~4095), ctypes.c_size_t(4096)); x = [None]",
    "a map of a file that has no room": """
import mmap
for n in range(9):
    f = open(str(n), 'wb+'); f.truncate(30 * 2**20); m = mmap.mmap(f.fileno(), 0)
    for at in range(0, 30 * 2**20, 4096): m[at] = 1""",
    "less CPU time": "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass",
    "SIGXCPU ignored": "import resource; signal.signal(signal.SIGXCPU, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_CPU, (1, 2))\nwhile True: pass",
    "less memory": "import resource; resource.setrlimit(resource.RLIMIT_AS, (1, 1))",
    "fewer files": "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))",
    "no stack": "import resource; resource.setrlimit(resource.RLIMIT_STACK, (4096, 4096))\ndef f(n): return f(n + 1)\nf(0)",
    "stopped like at a terminal": "os.kill(os.getpid(), signal.SIGTSTP); time.sleep(0.1)",
    "a library of its own": "open('numpy.py','w').write('raise SystemExit'); sys.path.insert(0, os.getcwd()); sys.modules.pop('numpy'); import numpy",
    "warnings as errors": "import warnings; warnings.simplefilter('error'); warnings.formatwarning = None; warnings.showwarning = lambda *a: 1 / 0; warnings.warn('x')",
    "broken random modules": "import random; random.seed = np.random.seed = None; random.random = None",
    "a figure that shows itself": """
from matplotlib.figure import Figure
class F(Figure):
    def draw(self, renderer): plt.show()
plt.figure(FigureClass=F); plt.show()""",
    "display of forged objects": "display(type('P', (Image.Image,), {{'size': (9, 9), 'mode': 'RGB', 'im': None}})(), type('R', (), {{'__repr__': lambda s: 'x' * 10**8}})())",
    "an endless display": "display(type('R', (), {{'__repr__': lambda s: __import__('time').sleep(99)}})())",
}

# Signals that would continue a stopped worker, in the forms that a filter of 32-bit arguments could miss.
CORNERS |= {
    "SIGCONT with high bits": "me, thread = os.getpid(), threading.get_native_id(); breach(sysc(62, me, 18 | (1 << 40)) == 0); breach(sysc(234, me, thread, 18 | (1 << 35)) == 0)",
    "SIGCONT to groups": "for target in (0, -1, -os.getpid()): breach(sysc(62, target, 18) == 0)",
    "SIGCONT with a message": """
info, me = ctypes.create_string_buffer(bytes(8) + (0xFFFFFFFF).to_bytes(4, 'little') + bytes(116)), os.getpid()
breach(sysc(129, me, 18, info) == 0); breach(sysc(297, me, me, 18, info) == 0)""",
    "SIGCONT in place of SIGIO": "import fcntl; fcntl.fcntl(socket.socketpair()[0], 10, 18); breach()",
    "SIGCONT at the zygote's death": "breach(_libc.prctl(1, 18, 0, 0, 0) == 0)",
    "a flag beyond 32 bits": """
fd, buffer = os.open(np.__file__, os.O_RDONLY), ctypes.create_string_buffer(64)
part = ctypes.create_string_buffer(ctypes.addressof(buffer).to_bytes(8, 'little') + (64).to_bytes(8, 'little'))
breach(sysc(327, fd, part, 1, 0, 0, 8) >= 0); breach(sysc(327, fd, part, 1, 0, 0, 8 | (1 << 33)) >= 0)""",
    "pages of libraries removed": """
import mmap
address = np.frombuffer(mmap.mmap(os.open(np.__file__, os.O_RDONLY), 4096, prot=mmap.PROT_READ), np.uint8).ctypes.data
breach([advice for advice in (9, 20, 21) if sysc(28, address, 4096, advice) == 0])""",
    "room reserved in every way": "f = open('a', 'wb'); breach([mode for mode in (0, 1, 2, 3, 8, 16, 32, 64) if sysc(285, f.fileno(), mode, 0, 1 << 30) == 0])",
    "copies that are unlinked": """
open('a', 'wb').write(bytes(30 << 20)); held = []
while True:
    source, copy = os.open('a', os.O_RDONLY), os.open('b', os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.unlink('b'); os.sendfile(copy, source, 0, 30 << 20); held.append(copy); os.close(source)""",
    "maps that are unlinked": """
import mmap
held = []
while True:
    f = open('b', 'wb+'); f.truncate(30 << 20); pages = mmap.mmap(f.fileno(), 0); os.unlink('b'); held.append(pages)
    for at in range(0, 30 << 20, 4096): pages[at] = 1""",
    "folders without number": "for n in range(10**6): os.mkdir(str(n))",
    "folders without end": "while True: os.mkdir('d'); os.chdir('d')",
}

HABITS |= {
    "native threads that hash": """
import hashlib
def f():
    data = bytes(1 << 20)
    while True: hashlib.sha256(data).digest()
for _ in range(8): threading.Thread(target=f, daemon=True).start()""",
    "threads that copy in the kernel": """
open('a', 'wb').truncate(30 << 20)
def f():
    while True:
        source, copy = os.open('a', os.O_RDONLY), os.open('b', os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.sendfile(copy, source, 0, 30 << 20); os.close(source); os.close(copy)
for _ in range(4): threading.Thread(target=f, daemon=True).start()""",
    "threads that yield": """
def f():
    while True: sysc(24)
for _ in range(30): threading.Thread(target=f, daemon=True).start()
f()""",
    "all signals blocked": "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\nwhile True: pass",
    "an exchange without end": "require(find_worker(), '_in_exchange')._in_exchange = True\nwhile True: pass",
    "every exception swallowed": """
while True:
    try:
        while True: pass
    except BaseException: pass""",
    "a picture of one line": "print('before'); Image.new('RGB', (4_000_000, 1)).show(); Image.new('RGB', (1, 4_000_000)).show()",
    "narrow pictures without end": "for _ in range(20_000): Image.new('RGB', (300, 1)).show()",
    "the module of json": "import json; json.loads = json.dumps = None; sys.modules['json'] = None",
}
