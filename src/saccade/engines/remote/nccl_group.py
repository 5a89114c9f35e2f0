"""A process group on GPUs that calls the NCCL library directly. Run between two processes of one GPU, not with vLLM.

torch's process groups don't expose NCCL's unique id, which a server needs to join. So this module calls five functions
of NCCL's C API through ctypes, in the library that ships with torch.
"""

import base64
import ctypes
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from saccade.errors import ConfigError

_LIBRARY = "libnccl.so.2"
_NCCL_DTYPES = {torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9}  # ncclDataType_t
_SUM = 0  # ncclRedOp_t


class _UniqueId(ctypes.Structure):
    """ncclUniqueId: identifies a group to the processes that join it."""

    _fields_ = [("internal", ctypes.c_char * 128)]


_Comm, _Pointer = ctypes.c_void_p, ctypes.c_void_p
_SIGNATURES: dict[str, list[Any]] = {
    "ncclGetUniqueId": [ctypes.POINTER(_UniqueId)],
    "ncclCommInitRank": [ctypes.POINTER(_Comm), ctypes.c_int, _UniqueId, ctypes.c_int],
    "ncclAllReduce": [_Pointer, _Pointer, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _Comm, _Pointer],
    "ncclBroadcast": [_Pointer, _Pointer, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _Comm, _Pointer],
    "ncclCommAbort": [_Comm],
}


def _to_nccl_dtype(value: Tensor) -> int:
    if value.dtype not in _NCCL_DTYPES:
        raise RuntimeError(f"NCCL can't broadcast weights of dtype {value.dtype}")
    return _NCCL_DTYPES[value.dtype]


def _load_library() -> Any:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise ConfigError(
            f"engine.settings.weight_sync=nccl needs NCCL, but this torch has no {_LIBRARY}; set weight_sync=files",
            key="engine.settings.weight_sync",
            value="nccl",
        ) from error
    for name, arguments in _SIGNATURES.items():
        getattr(library, name).argtypes = arguments  # not library[name], which returns a new object each time
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


class NcclGroup:
    """A group on GPUs; `device` is this process's. See broadcast.GlooGroup."""

    def __init__(self, world_size: int, device: torch.device) -> None:
        self._world_size, self._device, self._nccl = world_size, device, _load_library()
        self._unique_id, self._comm = _UniqueId(), _Comm()
        self._call("ncclGetUniqueId", ctypes.byref(self._unique_id))
        self._stream: Any = None

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._nccl, name)(*arguments):
            reason = self._nccl.ncclGetErrorString(code).decode(errors="replace")
            raise RuntimeError(f"{name} failed: {reason} (all processes need the same version of NCCL)")

    @property
    def init_info(self) -> Mapping[str, Any]:
        """See GlooGroup. The unique id contains the address of this process."""
        return {"nccl_unique_id_b64": base64.b64encode(ctypes.string_at(ctypes.byref(self._unique_id), 128)).decode()}

    def join(self) -> None:
        """See GlooGroup. NCCL waits forever for a process that doesn't join; this can't be interrupted."""
        with torch.cuda.device(self._device):
            comm = _Comm()
            self._call("ncclCommInitRank", ctypes.byref(comm), self._world_size, self._unique_id, 0)
            self._comm, self._stream = comm, torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            # vLLM's workers start with this all-reduce, so every rank must take part.
            with torch.cuda.stream(self._stream):
                zero = torch.zeros(1, device=self._device)
                pointer, dtype, stream = zero.data_ptr(), _to_nccl_dtype(zero), self._stream.cuda_stream
                self._call("ncclAllReduce", pointer, pointer, 1, dtype, _SUM, self._comm, stream)
            self._stream.synchronize()

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """See GlooGroup. Tensors are copied to the device one by one and held there until all are sent."""
        copies = []
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for tensor in tensors:
                copy = tensor.to(self._device).contiguous()
                pointer, count, dtype = copy.data_ptr(), copy.numel(), _to_nccl_dtype(copy)
                self._call("ncclBroadcast", pointer, pointer, count, dtype, 0, self._comm, self._stream.cuda_stream)
                copies.append(copy)
            self._stream.synchronize()

    def abort(self) -> None:
        """See GlooGroup. Kernels that wait for another process end, and with them the calls that wait for them."""
        comm, self._comm = self._comm, _Comm()
        if comm:
            self._nccl.ncclCommAbort(comm)  # its return code is ignored: nothing could be done about a failure
