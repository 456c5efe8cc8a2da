"""Large arrays of zeros on a CPU that take no time and no memory until they are written to.

XLA fills an array of zeros, which makes the system provide every page of it: half a second and a gigabyte of memory a
gigabyte, although a cache is mostly empty. Here XLA allocates the result of a custom call that does not touch it, but
asks Linux to forget the memory's contents: private memory reads as zeros from then on (madvise(2), MADV_DONTNEED), and
a page is provided when it is first written.

The call is the little of XLA's FFI (`xla/ffi/api/c_api.h`) that one result without arguments needs, through ctypes, so
that no compiler is needed:

    call frame   struct_size | extension | api | context | stage | args {size_t, ptr, n, ptr, ptr} | rets {the same} …
    extension    struct_size | type | next | metadata        the first call asks for the version: `metadata` is filled
    buffer       struct_size | extension | dtype | data | rank | dims
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

_TARGET = "jaxinfer_untouched"
_MADV_DONTNEED = 4
_METADATA = 1
_DTYPES = ("float16", "float32", "bfloat16")
_ITEM_BYTES = {10: 2, 11: 4, 16: 2}  # by XLA's number of the dtype
_API_VERSION = (0, 3)  # of the layouts below; XLA accepts handlers of older versions


def zeros(shape: tuple[int, ...], dtype: Any) -> Array:
    """`jnp.zeros` on the default device, untouched where that can be done."""
    if jnp.dtype(dtype).name not in _DTYPES or not _register():
        return jnp.zeros(shape, dtype)
    make = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))
    return jax.jit(make)()


class _Extension(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.c_void_p),
    )


class _Metadata(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("version_struct_size", ctypes.c_size_t),
        ("version_extension", ctypes.c_void_p),
        ("major_version", ctypes.c_int),
        ("minor_version", ctypes.c_int),
    )


class _Values(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("num_values", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("values", ctypes.POINTER(ctypes.c_void_p)),
    )


class _CallFrame(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.POINTER(_Extension)),
        ("api", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("arguments", _Values),
        ("results", _Values),
    )


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    )


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_CallFrame))
def _handler(frame_pointer: Any) -> None:
    frame = frame_pointer.contents
    if frame.extension and frame.extension.contents.type == _METADATA:
        metadata = _Metadata.from_address(frame.extension.contents.metadata)
        metadata.major_version, metadata.minor_version = _API_VERSION
        return
    buffer = _Buffer.from_address(frame.results.values[0])
    num_bytes = math.prod(buffer.dims[: buffer.rank]) * _ITEM_BYTES[buffer.dtype]
    _forget(buffer.data, num_bytes)


def _forget(address: int, num_bytes: int) -> None:
    """Make private memory read as zeros: whole pages by the system, what is left at both ends by hand."""
    first = min(-(-address // mmap.PAGESIZE) * mmap.PAGESIZE, address + num_bytes)
    last = max((address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE, first)
    madvise = ctypes.CDLL(None).madvise
    if last > first and madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED):
        ctypes.memset(first, 0, last - first)
    ctypes.memset(address, 0, first - address)
    ctypes.memset(last, 0, address + num_bytes - last)


@cache
def _register() -> bool:
    """Whether the custom call is there: tried once, on a small array."""
    if sys.platform != "linux" or jax.default_backend() != "cpu":
        return False
    try:
        jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(_handler), platform="cpu")
        make = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct((3, 1000), jnp.float32))
        with jax.ensure_compile_time_eval():  # the first to ask may be tracing
            return not np.asarray(jax.jit(make)()).any()  # by NumPy: for XLA's reduction a program would be compiled
    except (RuntimeError, ValueError, AttributeError, TypeError, OSError):  # another XLA, another C library
        return False
