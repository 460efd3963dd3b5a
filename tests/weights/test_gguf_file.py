"""Headers of GGUF files that are wrong in one place each."""

import struct

import pytest

from jaxlayers.weights.gguf_file import GgufFile


def string(text):
    return struct.pack("<Q", len(text)) + text


def header(version=3, tensors=0, keys=0, body=b""):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + body


def array_key(kind, count, body=b"", key=b"k"):
    return string(key) + struct.pack("<IIQ", 9, kind, count) + body


def tensor(name=b"t", shape=(32,), type=0, offset=0):
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type, offset)


NESTED = struct.pack("<IQ", 9, 1) * 10


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "too short"),
        (b"GGUF", "too short"),
        (b"GGML" + bytes(40), "does not start with GGUF"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(40), "big-endian"),
        (header(1, body=bytes(40)), "version 1"),
        (header(4, body=bytes(40)), "version 4"),
        (header(tensors=2**63, body=bytes(40)), "announces 9223372036854775808 tensors"),
        (header(keys=2**40, body=bytes(40)), "announces 1099511627776 keys"),
        (header(keys=1, body=array_key(8, 2**40, bytes(99))), "announces 1099511627776 strings"),
        (header(keys=1, body=array_key(4, 2**62, bytes(99))), "elements"),
        (header(keys=1, body=array_key(9, 2**61, bytes(99))), "arrays"),
        (header(keys=1, body=array_key(9, 1, NESTED)), "nests arrays deeper"),
        (header(keys=1, body=array_key(13, 1, bytes(99))), "unknown value type 13"),
        (header(keys=1, body=struct.pack("<Q", 2**64 - 1) + bytes(99)), "bytes are due"),
        (
            header(keys=1, body=array_key(8, 1, struct.pack("<Q", 2**63) + bytes(9))),
            "a string of key 'k' has",
        ),
        (header(keys=1, body=array_key(8, 1, string(b"\xff\xfe"))), "not UTF-8"),
        (header(keys=1, body=string(b"\xff") + bytes(30)), "not UTF-8"),
        (header(keys=1, body=string(b"k") + struct.pack("<I", 7) + b"\x02"), "boolean"),
        (header(keys=2, body=(string(b"k") + struct.pack("<IB", 0, 1)) * 2), "stands twice"),
        (header(keys=1, body=string(b"general.alignment") + struct.pack("<II", 4, 24)), "power of two"),
        (header(tensors=1, body=tensor(shape=(2**40, 2**40))), "cut short"),
        (header(tensors=1, body=tensor(shape=(1,) * 5)), "5 dimensions"),
        (header(tensors=1, body=tensor(shape=(32, 0))), "shape"),
        (header(tensors=1, body=tensor(shape=(33,), type=2)), "whole blocks of 32"),
        (header(tensors=1, body=tensor(type=99)), "unknown type 99"),
        (header(tensors=1, body=tensor(offset=2**63) + bytes(999)), "cut short"),
        (header(tensors=1, body=tensor(offset=1) + bytes(999)), "multiple of 32"),
        (header(tensors=2, body=tensor() * 2 + bytes(999)), "stands twice"),
    ],
)
def test_damaged_headers(tmp_path, data, match):
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=match) as caught:
        GgufFile(path)
    assert "\n" not in str(caught.value)
