"""The framing of TFRecord files: length, its checksum, data, its checksum, one record after the other.

    uint64 length | uint32 masked CRC-32C of the length's 8 bytes | data | uint32 masked CRC-32C of the data

All little-endian (TensorFlow's `tsl/lib/io/record_writer.h`). Damaged data costs one record, a damaged length all that
follow it, since nothing marks where a record begins.
"""

from __future__ import annotations

import struct

from google_crc32c import value as crc32c

LENGTH = struct.Struct("<Q")
HEADER = struct.Struct("<QI")
CHECKSUM = struct.Struct("<I")
_MASK_DELTA = 0xA282EAD8


def masked_crc(data: bytes) -> int:
    """The CRC-32C of `data` as TFRecord files store it: rotated and moved, lest data that ends with it be its own."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def frame(data: bytes) -> bytes:
    """`data` as a record of a TFRecord file."""
    length = LENGTH.pack(len(data))
    return b"%b%b%b%b" % (length, CHECKSUM.pack(masked_crc(length)), data, CHECKSUM.pack(masked_crc(data)))
