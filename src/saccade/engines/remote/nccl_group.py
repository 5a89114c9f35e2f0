"""A group of processes on GPUs, by NCCL's own library. It was not run on GPUs yet.

torch's groups make their identity themselves and keep it; here it must travel to a server. So NCCL is asked directly,
through the library that torch has brought along: five functions of its C interface, in the words of its manual.
"""

import base64
import ctypes
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from saccade.errors import ConfigError

_LIBRARY = "libnccl.so.2"
_TYPES = {torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9}  # ncclDataType_t
_SUM = 0  # ncclRedOp_t


class _Id(ctypes.Structure):
    """ncclUniqueId: how the processes of a group find each other."""

    _fields_ = [("internal", ctypes.c_char * 128)]


_Comm, _Pointer = ctypes.c_void_p, ctypes.c_void_p
_SIGNATURES: dict[str, list[Any]] = {
    "ncclGetUniqueId": [ctypes.POINTER(_Id)],
    "ncclCommInitRank": [ctypes.POINTER(_Comm), ctypes.c_int, _Id, ctypes.c_int],
    "ncclAllReduce": [_Pointer, _Pointer, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _Comm, _Pointer],
    "ncclBroadcast": [_Pointer, _Pointer, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _Comm, _Pointer],
    "ncclCommAbort": [_Comm],
}


def _type(value: Tensor) -> int:
    if value.dtype not in _TYPES:
        raise RuntimeError(f"weights can't be sent as {value.dtype}")
    return _TYPES[value.dtype]


def _library() -> Any:
    try:
        found = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise ConfigError(
            f"engine.settings.transfer=nccl takes NCCL, and this torch brings no {_LIBRARY}; leave transfer at files"
        ) from error
    for name, arguments in _SIGNATURES.items():
        getattr(found, name).argtypes = arguments  # not found[name], which is another one each time
    found.ncclGetErrorString.restype = ctypes.c_char_p
    return found


class Nccl:
    """A group on GPUs, of which `device` is this process's; see groups.Group. Not run on GPUs yet."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._device, self._nccl = size, device, _library()
        self._id, self._comm = _Id(), _Comm()
        self._call("ncclGetUniqueId", ctypes.byref(self._id))
        self._stream: Any = None

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._nccl, name)(*arguments):
            why = self._nccl.ncclGetErrorString(code).decode(errors="replace")
            raise RuntimeError(f"NCCL's {name} failed: {why} (all processes must have the same version of NCCL)")

    @property
    def invitation(self) -> Mapping[str, Any]:
        """See Group. Its identity holds the address at which this process waits for the others."""
        return {"nccl_unique_id_b64": base64.b64encode(ctypes.string_at(ctypes.byref(self._id), 128)).decode()}

    def join(self) -> None:
        """See Group. NCCL waits without end where another process doesn't come, and can't be told to stop."""
        with torch.cuda.device(self._device):
            comm = _Comm()
            self._call("ncclCommInitRank", ctypes.byref(comm), self._size, self._id, 0)
            self._comm, self._stream = comm, torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            # vLLM's processes begin with this sum, and wait for everyone's part.
            with torch.cuda.stream(self._stream):
                one = torch.zeros(1, device=self._device)
                self._call("ncclAllReduce", one.data_ptr(), one.data_ptr(), 1, _type(one), _SUM, *self._where())
            self._stream.synchronize()

    def send(self, values: Iterable[Tensor]) -> None:
        """See Group. Tensors come to the device as they are sent, and stay there until the last has left."""
        kept = []
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for value in values:
                here = value.to(self._device).contiguous()
                at, count = here.data_ptr(), here.numel()
                self._call("ncclBroadcast", at, at, count, _type(here), 0, *self._where())
                kept.append(here)
            self._stream.synchronize()

    def _where(self) -> tuple[Any, ...]:
        return self._comm, self._stream.cuda_stream

    def leave(self) -> None:
        """See Group. Kernels that wait for another process end; whoever waits for these goes on."""
        comm, self._comm = self._comm, _Comm()
        if comm:
            self._nccl.ncclCommAbort(comm)  # whatever it says, there is nothing left to do
