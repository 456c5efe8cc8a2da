"""Writes the TFRecord files beside it with TensorFlow itself: `python make_tfrecords.py`, with tensorflow-cpu 2.21.

What they hold is said once more in tests/batch/inputs/test_tfrecord.py, which reads them without TensorFlow.
"""

from pathlib import Path

import tensorflow as tf  # pyright: ignore[reportMissingImports, reportMissingModuleSource]

HERE = Path(__file__).parent


def feature(values):
    if not values:
        return tf.train.Feature()
    if isinstance(values[0], bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    if isinstance(values[0], int):
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))
    return tf.train.Feature(float_list=tf.train.FloatList(value=values))


def example(**features):
    return tf.train.Example(
        features=tf.train.Features(feature={name: feature(values) for name, values in features.items()})
    )


def write(name, messages, options=None):
    with tf.io.TFRecordWriter(str(HERE / name), options) as writer:
        for message in messages:
            writer.write(message.SerializeToString(deterministic=True))


prompts = [
    example(prompt=["Grüße, 世界".encode()], id=[0], temperature=[0.5]),
    example(prompt=[b""], id=[-(2**63), 2**63 - 1, -1], weights=[1.5, -0.25, float("inf")], nothing=[]),
    example(prompt_token_ids=[1, 300, 70000], tags=[b"a", b"\xff\x00"], prompt=[b"x" * 300]),
    example(),
]
write("prompts-00000-of-00001.tfrecord", prompts)
write("gzip.tfrecord", prompts, tf.io.TFRecordOptions("GZIP"))
write("zlib.tfrecord", prompts, tf.io.TFRecordOptions("ZLIB"))
context = tf.train.Features(feature={"prompt": feature([b"hello"])})
steps = tf.train.FeatureLists(feature_list={"steps": tf.train.FeatureList(feature=[feature([1])])})
write("sequence.tfrecord", [tf.train.SequenceExample(context=context, feature_lists=steps)])
