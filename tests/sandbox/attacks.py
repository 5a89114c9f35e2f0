# ruff: noqa: E501 (an attack stands on one line)
"""Code that tries to escape, to survive, to exhaust resources or to forge results. It prints BREACH if it succeeds.

`{labels}` is a file with labels that every user may read, `{folder}` its folder; `{port}`, `{unix}`, `{abstract}` and
`{datagram}` are listening sockets; `{host}` is the trainer's process id. `sysc` calls the kernel by number. `require`
and `find_worker` print MISSED if the worker no longer has a name that an attack uses.
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
def require(target, *names):
    for name in names:
        if not hasattr(target, name): print('MISSED', name)
    return target
def find_worker():
    import gc
    found = [o for o in gc.get_objects() if type(o).__name__ == 'SandboxWorker']
    return require(found[0] if found else None, '_nonce', '_images_left', '_next_image', '_run_cell')
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
    "read it as an image": "breach(Image.open('{labels}'))",
    "read it with numpy": "breach(np.fromfile('{labels}', np.uint8))",
    "read it in C": "_libc.fopen.restype = ctypes.c_void_p; breach(_libc.fopen(b'{labels}', b'r'))",
    "open by handle": "breach(sysc(304, -100, ctypes.create_string_buffer(64), 0) >= 0)",
    "openat2": "breach(sysc(437, -100, b'{labels}', ctypes.create_string_buffer(24), 24) >= 0)",
    "passwords": "breach(open('/etc/passwd').read())",
    "passwords that are hidden": "breach(open('/etc/shadow').read())",
    "the home folder": "breach(os.listdir('{home}'))",
    "the project's sources": "breach(open('{source}').read())",
    "write to the libraries": "open(np.__file__, 'a').write('#'); breach()",
    "a new library": "open(os.path.join(os.path.dirname(os.path.dirname(np.__file__)), 'evil.py'), 'w'); breach()",
    "write to the system": "open('/etc/evil', 'w'); breach()",
    "write to the root": "open('/evil', 'w'); breach()",
    "shared memory": "open('/dev/shm/evil', 'w'); breach()",
    "the memory of the machine": "breach(open('/dev/mem', 'rb').read(1))",
    "a disk": "breach(open('/dev/vda', 'rb').read(1))",
    "a disk by another name": "breach(open('/dev/sda', 'rb').read(1))",
    "the trainer's environment": "breach(open('/proc/{host}/environ').read())",
    "its own environment": "breach([k for k in os.environ if 'SECRET' in k or 'TOKEN' in k])",
    "its parent's memory": "breach(open('/proc/%d/mem' % os.getppid(), 'rb'))",
    "its own maps": "breach(open('/proc/self/maps').read())",
    "switches of the kernel": "breach(open('/proc/sys/kernel/hostname', 'w'))",
    "devices of the machine": "breach(os.listdir('/sys'))",
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
    "copy between descriptors": "fd=os.open('{labels}', os.O_RDONLY); breach(os.copy_file_range(fd, os.open('x', os.O_CREAT|os.O_RDWR), 9))",
    "a lease on its folder": "import fcntl; fd=os.open('.', os.O_RDONLY); fcntl.fcntl(fd, 1026, 0x80000004); breach('dnotify')",
    "leave through a descriptor": """
for fd in range(0, 1024):
    try: os.fchdir(fd)
    except OSError: continue
    breach(os.listdir('..'))""",
    "a handle by name": "b=ctypes.create_string_buffer(256); b[0:4]=(128).to_bytes(4,'little'); breach(sysc(303,-100,b'/',b,ctypes.create_string_buffer(8),0)==0)",
    "an unnamed program": "fd=os.open('p', os.O_CREAT|os.O_RDWR, 0o700); os.write(fd, b'#!/bin/sh'); os.unlink('p'); os.execve(fd, ['x'], {{}}); breach()",
    "quotas and swap": "breach(sysc(179, 0x80000700, b'/', 0, ctypes.create_string_buffer(128)) == 0); breach(sysc(167, b'x', 0) == 0)",
    "the log of the kernel": "breach(sysc(103, 3, ctypes.create_string_buffer(99), 99)>0)",
    "secret memory": "breach(sysc(447, 0)>=0)",
    "mounts of the new kind": "breach(sysc(430, b'tmpfs', 0)>=0); breach(sysc(428, -100, b'/', 1)>=0); breach(sysc(429, -100, b'/', -100, b'.', 0)>=0)",
    "a list of mounts": "breach(sysc(457, ctypes.create_string_buffer(64), ctypes.create_string_buffer(512), 512, 0)>=0); breach(sysc(458, ctypes.create_string_buffer(64), ctypes.create_string_buffer(512), 512, 0)>=0)",
    "the security modules": "breach(sysc(461, ctypes.create_string_buffer(64), ctypes.create_string_buffer(8), 0)>=0); breach(sysc(460, 100, ctypes.create_string_buffer(64), 64, 0)>=0)",
    "the page cache": "breach(sysc(451, 0, ctypes.create_string_buffer(64), ctypes.create_string_buffer(64), 0)>=0)",
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
    "a netlink socket": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW); breach()",
    "listen": "s = socket.socket(); s.bind(('', 0)); s.listen(); breach()",
    "a name": "breach(socket.getaddrinfo('localhost', 80, proto=socket.IPPROTO_TCP)[0][4] and socket.socket())",
    "a page": "import urllib.request; breach(urllib.request.urlopen('http://127.0.0.1:{port}/', timeout=2))",
    "a virtual machine's host": "socket.socket(40, socket.SOCK_STREAM); breach()",
    "a socket by number": "breach(sysc(41, 2, 1, 0) >= 0)",
    "io_uring": "breach(sysc(425, 8, ctypes.create_string_buffer(120)) >= 0)",
    "messages by number": "a,b=socket.socketpair(); breach(sysc(46, a.fileno(), ctypes.create_string_buffer(56), 0)>=0); breach(sysc(307, a.fileno(), ctypes.create_string_buffer(64), 1, 0)>=0)",
    "a pair that connects": "a,b=socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.connect('\\0{abstract}'); breach()",
    "a pair that is bound": "a,b=socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.bind('\\0evil'); breach()",
    "a socket that connects": "s=socket.socket(fileno=os.dup(3)); s.connect('{unix}'); breach()",
    "accept at the socket": "s=socket.socket(fileno=os.dup(3)); s.accept(); breach()",
    "receive descriptors": "s=socket.socket(fileno=os.dup(3)); socket.recv_fds(s,1,9); breach()",
    "credentials of the peer": "import struct; s=socket.socket(fileno=os.dup(3)); p,u,g=struct.unpack('iii', s.getsockopt(1,17,12)); os.kill(p,9) if p else 1/0; breach(p)",
    "a pidfd of the peer": "import struct; s=socket.socket(fileno=os.dup(3)); fd=struct.unpack('i', s.getsockopt(1,77,4))[0]; breach(fd)",
    "signals by any handle": "for fd in range(64): breach(sysc(424, fd, 9, 0, 0)==0); breach(sysc(438,fd,0,0)>=0)",
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
    "kill all processes": "os.kill(-1, 9); breach()",
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
    "a clone with its parent's parent": "breach(sysc(56, 0x8000|17, 0, 0, 0, 0) > 0)",
    "a thread in new namespaces": "breach(sysc(56, 0x00010f00 | 0x10000000, 0, 0, 0, 0) >= 0)",
    "a clone with high bits": "breach(sysc(56, (1<<32)|0x00010000|0x40000000, 0,0,0,0)>=0)",
    "a terminal of its own": "breach(os.forkpty())",
    "a fresh interpreter": "import multiprocessing as m; c=m.get_context('spawn'); p=c.Process(target=print); p.start(); breach()",
    "a fork server": "import multiprocessing as m; c=m.get_context('forkserver'); p=c.Process(target=print); p.start(); breach()",
    "a pool of processes": """
from concurrent.futures import ProcessPoolExecutor as P
with P(1) as p: breach(p.submit(abs,1).result())""",
    "a named semaphore": "import multiprocessing as m; l=m.Lock(); breach('posix semaphore')",
    "named shared memory": "from multiprocessing.shared_memory import SharedMemory; SharedMemory(create=True,size=99); breach()",
    "a pipe from a shell": "breach(os.popen('echo hi').read())",
    "a shell in C": "breach(_libc.system(b'true')==0)",
    "fork in C": "p=_libc.fork(); breach(p>=0)",
    "a signal with a message": "breach(sysc(297, {host}, {host}, 9, ctypes.create_string_buffer(128))==0)",
    "a timer for the trainer": "b=bytearray(64); b[8:12]=(9).to_bytes(4,'little'); b[12:16]=(4).to_bytes(4,'little'); b[16:20]=({host}).to_bytes(4,'little'); t=ctypes.create_string_buffer(8); breach(sysc(222, 0, ctypes.create_string_buffer(bytes(b)), t)==0)",
    "an owner by ioctl": "import fcntl; fcntl.ioctl(3, 0x8901, ({host}).to_bytes(4,'little')); breach()",
    "type into the terminal": "import fcntl; fcntl.ioctl(1, 0x5412, b'x'); breach()",
    "the trainer's group": "breach(sysc(109, 0, {host})==0)",
    "advice on the trainer's memory": "breach(sysc(440, 3, 0, 0, 0, 0)>=0)",
    "compare with the trainer": "breach(sysc(312, {host}, {host}, 0, 0, 0)>=0)",
    "move the trainer's pages": "breach(sysc(256, {host}, 1, ctypes.create_string_buffer(8), ctypes.create_string_buffer(8))>=0)",
    "the trainer's disk priority": "breach(sysc(251, 1, {host}, 0)==0)",
    "tune the clock": "breach(sysc(159, ctypes.create_string_buffer(256))>=0)",
    "ports of the machine": "breach(sysc(172, 3)==0); breach(sysc(173, 0x80, 1, 1)==0)",
    "its own dumps": "breach(_libc.prctl(4,1,0,0,0)==0)",
    "adopt orphans": "breach(_libc.prctl(36,1,0,0,0)==0)",
    "syscalls to its own handler": "breach(_libc.prctl(59, 1, 0, 0, 0)==0); breach(_libc.prctl(65,1,0,0,0)==0)",
    "a filter that reports": "breach(sysc(317, 1, 8, ctypes.create_string_buffer(16))>=0)",
    "segments of its own": "breach(sysc(154, 1, ctypes.create_string_buffer(16), 16)==0)",
    "all calls of x32": """
for n in (57,56,59,41,101,310,520,521,545): breach(sysc(0x40000000+n,0,0,0,0,0)>=0)""",
    "calls beyond the table": "breach(sysc(-1)>=0); breach(sysc(0x7fffffff)>=0)",
    "more open files": "import resource; resource.setrlimit(resource.RLIMIT_NOFILE,(4096,)*2); breach()",
    "more threads": "import resource as r; least = r.getrlimit(r.RLIMIT_NPROC)[1]; r.setrlimit(r.RLIMIT_NPROC, (least + 1,) * 2) if least > 0 else 1 / 0; breach()",
    "a larger stack": "import resource; resource.setrlimit(resource.RLIMIT_STACK,(resource.RLIM_INFINITY,)*2); breach()",
    "shared memory without end": """
import mmap
b=[mmap.mmap(-1, 10**8, flags=mmap.MAP_SHARED) for _ in range(99)]
breach('10 GB shared')""",
    "pipes full of data": """
import fcntl
held=[]
while True:
    r,w=os.pipe(); os.set_blocking(w,False); held.append((r,w))
    try:
        while True: os.write(w, bytes(65536))
    except BlockingIOError: pass""",
    "pairs full of data": """
held=[]
while True:
    a,b=socket.socketpair(); a.setblocking(False); held.append((a,b))
    try:
        a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1<<30); breach('sndbuf')
    except OSError: pass
    try:
        while True: a.send(bytes(65536))
    except BlockingIOError: pass""",
}

TRICKS = {
    "an image that pickles": """
class Evil(Image.Image):
    def __reduce__(self): return os.system, ('touch {folder}/new',)
    def tobytes(self, *a): return b'\\x80\\x04cos\\nsystem\\n'
    size = property(lambda self: (2, 2)); mode = 'RGB'
Evil().show()""",
    "an image with a forged size": """
picture = Image.new('RGB', (8, 8))
Image.Image.tobytes = lambda self, *a: bytes(10)
picture.show()""",
    "an error that exits": """
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
    "no stdout": "sys.stdout.close(); sys.__stdout__ = None",
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
    "the worker changed": """
o = find_worker(); o._nonce=b'x'*8; o._images_left=999; o._next_image=77""",
    "stdout removed in a thread": """
def f():
    while True: sys.stdout=None
threading.Thread(target=f, daemon=True).start()""",
    "its own interrupt": "import saccade.sandbox.worker as g; require(g, 'TimeLimitExceeded'); raise g.TimeLimitExceeded()",
    "a signal to itself": "os.kill(os.getpid(), signal.SIGUSR1)",
    "a replaced error formatter": "import sys; m=require(sys.modules.get('saccade.sandbox.worker'), 'format_traceback'); print(m); m.format_traceback=lambda e: 'HACKED'",
    "broken libraries": "import struct, linecache, traceback; struct.pack=None; linecache.cache=None; traceback.TracebackException=None; import os; os.fstat=None; signal.signal=None",
    "a broken socket": "socket.socket.sendall=None; socket.socket.recv_into=None",
    "import hooks": """
import builtins
class H:
    def find_spec(self,*a): raise SystemExit
sys.meta_path.insert(0,H()); sys.path_hooks[:]=[]; sys.path.clear(); builtins.__import__=lambda *a: 1/0""",
    "another Image": "Image.Image.tobytes=lambda s,*a: 'text'; Image.Image.convert=lambda s,*a: s; Image.new('RGB',(5,5)).show()",
    "no names": "globals().clear()",
    "no built-ins in its names": "del sys.modules['__main__']; globals().clear(); __builtins__=None",
    "an exception of no class": """
class E(Exception):
    __class__=property(lambda s: 1/0)
raise E()""",
    "an exit with a broken code": """
class S(str):
    def __add__(s,o): return 1/0
sys.exit(S('a'))""",
    "an error in a circle": "e=ValueError('x'); f=ValueError('y'); e.__cause__=f; f.__cause__=e; raise e",
    "errors in errors": """
def g(n): return ValueError(n) if n==0 else ExceptionGroup('g',[g(n-1)])
raise g(900)""",
    "an impossible syntax error": "raise SyntaxError('x', ('f', 10**9, -5, object(), 3, 3))",
    "an error of half characters": "raise ValueError('\\ud800\\udfff')",
    "all descriptors but the first": "os.closerange(3,1024)",
    "stdout into the socket": "os.dup2(3,1)",
    "the socket into stdout": "os.dup2(1,3)",
    "stdout into a file": "f=os.open('a',os.O_CREAT|os.O_RDWR); os.dup2(f,1); print('to file'*1000)",
    "standard output closed in passing": "f=os.fdopen(1,'w'); del f",
    "non-blocking stdout": "os.set_blocking(1,False); print('x'*10**6)",
    "a non-blocking socket": "os.set_blocking(3,False)",
    "an end in a thread": "threading.Thread(target=lambda: os._exit(3)).start(); time.sleep(1)",
    "interrupt itself": "os.kill(os.getpid(), signal.SIGINT); time.sleep(1)",
    "a handle of signals": "r,w=os.pipe(); os.set_blocking(w,False); signal.set_wakeup_fd(w)",
    "memory written over": "for o in range(0, 4096, 8): ctypes.memset(id(os)+o, 255, 8)",
    "None freed": "ctypes.memset(id(None),0,8); x=[None]*10; del x",
    "True is false": "ctypes.memset(id(True)+24, 0, 4); print(True)",
    "a chain of a million": """
class A: pass
a=A()
for i in range(10**5): b=A(); b.x=a; a=b
del a,b""",
    "deep pickles": """
import pickle
l=[]
for _ in range(10**5): l=[l]
pickle.dumps(l)""",
    "a pickle that runs": "import pickle; pickle.loads(b'cos\\nsystem\\n(S\"touch {folder}/new\"\\ntR.')",
    "collected in passing": "import gc; gc.set_threshold(1); gc.callbacks.append(lambda *a: 1/0)",
    "a trace for threads": "threading.settrace(lambda *a: 1/0); threading.setprofile(lambda *a: 1/0)",
    "no folder": "import shutil; shutil.rmtree(os.getcwd(), ignore_errors=True); os.listdir('.')",
    "another temporary folder": "import tempfile; tempfile.tempdir='/etc'; os.environ.clear(); os.chdir('/')",
    "a sparse file": "f=open('s','wb'); f.truncate(10**12)",
    "an empty image": "Image.new('RGB',(0,5)).show()",
    "an empty figure": "plt.figure(figsize=(0,0)); plt.show()",
    "a figure without end": "f=plt.figure(); f.set_dpi(float('inf')); plt.show()",
    "an image of a huge forged size": """
class I(Image.Image):
    @property
    def size(self): return (10**9,10**9)
i=I(); i.show()""",
    "a bomb of zeros": """
import zlib,struct
def c(t,d): return struct.pack('>I',len(d))+t+d+struct.pack('>I',zlib.crc32(t+d))
open('b.png','wb').write(b'\\x89PNG\\r\\n\\x1a\\n'+c(b'IHDR',struct.pack('>IIBBBBB',60000,60000,8,2,0,0,0))+c(b'IDAT',zlib.compress(bytes(10**6)))+c(b'IEND',b'')); Image.open('b.png').show()""",
    "memory of others by stride": "np.lib.stride_tricks.as_strided(np.zeros(1), (10**9,), (10**6,)).sum()",
    "an audit that exits": "sys.addaudithook(lambda *a: os._exit(0))",
    "a report later": "import faulthandler; faulthandler.enable(); faulthandler.dump_traceback_later(0.2, exit=True)",
    "a debugger": "import pdb; pdb.set_trace()",
    "an interactive console": "import code; code.interact()",
}

PROTOCOL_PRELUDE = f"""{PRELUDE}
import struct, socket, os
line = socket.socket(fileno=os.dup(3))
nonce = find_worker()._nonce
DONE, IMAGE_SHOWN, VIDEO_REQUEST = 1, 2, 3
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
    "a huge image": "line.sendall(head(2, 65535, 65535, 0, 4294705155) + bytes(100_000))",
    "an image of the wrong size": "line.sendall(head(2, 10, 10, 0, 7) + bytes(7))",
    "an empty image": "line.sendall(head(2, 0, 10, 0, 0))",
    "an overflowing image": "line.sendall(head(2, 2**31, 2**31, 0, 0))",
    "endless images": "while True: line.sendall(head(2, 1, 1, 0, 3) + bytes(3))",
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
    "shut down for reading": "line.shutdown(socket.SHUT_RD)",
    "another socket": "a, b = socket.socketpair(); os.dup2(a.fileno(), 3)",
    "read the worker's requests": "line.settimeout(0.1); line.recv(1)",
    "never read": "line.sendall(head(3, 0) * 1000)",
    "a frame without height": "line.sendall(head(VIDEO_REQUEST, 0, 9, 0, 4) + bytes(4)); time.sleep(1)",
    "a frame of 2**32 lines": "line.sendall(head(VIDEO_REQUEST, 0, 2**32 - 1, 2**32 - 1, 4) + bytes(4)); time.sleep(1)",
    "half a number of a frame": "line.sendall(head(VIDEO_REQUEST, 0, 9, 9, 5) + bytes(5)); time.sleep(1)",
    "frames for the dead": "line.sendall(head(VIDEO_REQUEST, 0, 64, 64, 3600) + bytes(3600)); os._exit(0)",
    "requests without pause": "for _ in range(20_000): line.sendall(head(VIDEO_REQUEST, 0, 9, 9, 4) + bytes(4))",
    "half a picture": "line.sendall(head(IMAGE_SHOWN, 1000, 1000, 0, 3_000_000) + bytes(5)); time.sleep(99)",
    "narrow pictures": "for _ in range(100): line.sendall(head(IMAGE_SHOWN, 300, 1, 0, 900) + bytes(900))",
    "done, and going on": "line.sendall(head(DONE)); print('later')\nwhile True: pass",
    "done twice": "line.sendall(head(DONE) * 2)",
}
