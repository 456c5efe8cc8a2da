"""`tf.train.Example`, the message that records of TFRecord files hold: features by name, each a list of one kind.

The message is described here field by field (TensorFlow's `core/example/example.proto` and `feature.proto` give the
numbers) and made by protobuf at run time. Its map of features is described as the list of entries that a map is on the
wire: protobuf's lists are several times faster from Python, and their order is the writer's own.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

Features = dict[str, list[bytes] | list[int] | list[float]]


def _example_class() -> Any:
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="jaxinfer/example.proto", package="jaxinfer", syntax="proto3")

    def message(name: str, *fields: tuple[str, int, Any, bool], oneof: str | None = None) -> None:
        described = file.message_type.add(name=name)
        if oneof is not None:
            described.oneof_decl.add(name=oneof)
        for field_name, number, kind, repeated in fields:
            label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            added = described.field.add(name=field_name, number=number, label=label)
            if isinstance(kind, str):
                added.type, added.type_name = field.TYPE_MESSAGE, f".jaxinfer.{kind}"
            else:
                added.type = kind
            if oneof is not None:
                added.oneof_index = 0

    message("BytesList", ("value", 1, field.TYPE_BYTES, True))
    message("FloatList", ("value", 1, field.TYPE_FLOAT, True))
    message("Int64List", ("value", 1, field.TYPE_INT64, True))
    kinds = [("bytes_list", 1, "BytesList", False), ("float_list", 2, "FloatList", False)]
    message("Feature", *kinds, ("int64_list", 3, "Int64List", False), oneof="kind")
    message("Entry", ("key", 1, field.TYPE_STRING, False), ("value", 2, "Feature", False))
    message("Features", ("feature", 1, "Entry", True))
    # A tf.train.SequenceExample has a second field, by which it is told from an Example.
    message("Example", ("features", 1, "Features", False), ("feature_lists", 2, field.TYPE_BYTES, False))
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("jaxinfer.Example"))


_Example = _example_class()


def decode(data: bytes) -> Features:
    """The features of a serialized Example; of a name that comes twice, the last, as in any protobuf map.

    Raises:
        ValueError: `data` is no Example.
    """
    try:
        message = _Example.FromString(data)
    except DecodeError:
        raise ValueError("the record is no tf.train.Example") from None
    if message.feature_lists:
        raise ValueError("the record is a tf.train.SequenceExample: write a tf.train.Example")
    entries = message.features.feature
    if not entries and data and not message.HasField("features"):
        raise ValueError("the record is no tf.train.Example")
    found: Features = {}
    for entry in entries:
        name, feature = entry.key, entry.value
        if "\0" in name:
            raise ValueError(f"the feature's name {name[:60]!r} has a NUL: rename the feature")
        # At most one of them is set, and an unset one is empty.
        found[name] = feature.bytes_list.value[:] or feature.int64_list.value[:] or feature.float_list.value[:]
    return found


def encode(features: Features) -> bytes:
    """The Example of `features`, in the order of their names: equal features are equal bytes.

    Raises:
        ValueError, TypeError: a list is not of bytes, of ints of 64 bits or of floats alone.
    """
    message = _Example()
    entries = message.features.feature
    for name in sorted(features):
        values = features[name]
        feature = entries.add(key=name).value
        if not values:
            feature.SetInParent()
        elif isinstance(values[0], bytes):
            feature.bytes_list.value.extend(values)
        elif isinstance(values[0], int):
            feature.int64_list.value.extend(values)
        else:
            feature.float_list.value.extend(values)
    return message.SerializeToString()
