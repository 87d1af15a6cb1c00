"""Executes one operation of the test matrix with libnbd.

The argument is a JSON object: the operation, how to connect, and the expected bytes. The exit code is 0 if all checks
succeed.
"""
import json
import os
import sys

import nbd

task = json.loads(sys.argv[1])
offset, length = task["range"]
operation = task["operation"]

h = nbd.NBD()
if task["style"] != "any":
    h.set_request_structured_replies(task["style"] != "Simple")
    if hasattr(h, "set_request_extended_headers"):
        h.set_request_extended_headers(task["style"] == "Extended")
if operation == "block status":
    h.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
h.set_export_name(task["export"])
if task["tls"]:
    h.set_tls(nbd.TLS_REQUIRE)
    h.set_tls_certificates(task["certificates"])
    h.connect_tcp("127.0.0.1", str(task["port"]))
    assert h.get_tls_negotiated(), "no TLS"
else:
    h.connect_unix(task["socket"])
if task["style"] != "any":
    structured = h.get_structured_replies_negotiated()
    assert structured == (task["style"] != "Simple"), f"structured replies: {structured}"
size = h.get_size()
assert size == task["size"], f"size {size}"


def expect(offset, length, byte):
    found = h.pread(length, offset)
    assert found == bytes([byte]) * length, f"{length} bytes at {offset} are not all {byte:#x}"


def base():
    data = bytes(h.pread(size, 0))
    half = task["data_end"] // 2
    assert data == b"\x11" * half + b"\x22" * half + bytes(size - 2 * half), "not the bytes of before"


if operation == "read":
    base()
elif operation == "write":
    h.pwrite(bytes([task["byte"]]) * length, offset)
    expect(offset, length, task["byte"])
    h.flush()
elif operation == "FUA":
    assert h.can_fua(), "FUA is not offered"
    h.pwrite(bytes([task["byte"]]) * length, offset, nbd.CMD_FLAG_FUA)
    expect(offset, length, task["byte"])
elif operation == "trim":
    assert h.can_trim(), "trim is not offered"
    h.trim(length, offset)
    expect(offset, length, 0)
elif operation == "zero":
    assert h.can_zero(), "zero is not offered"
    h.zero(length, offset, nbd.CMD_FLAG_NO_HOLE)
    expect(offset, length, 0)
elif operation == "fast zero":
    assert h.can_fast_zero(), "fast zero is not offered"
    h.zero(length, offset, nbd.CMD_FLAG_FAST_ZERO)
    expect(offset, length, 0)
elif operation == "block status":
    extents = []

    def on_extents(context, start, entries, error):
        # libnbd passes a flat list of lengths and flags, or, if lengths have 64 bits, a list of pairs.
        if entries and not isinstance(entries[0], tuple):
            entries = list(zip(entries[::2], entries[1::2]))
        for run, flags in entries:
            if extents and extents[-1][1] == flags:
                extents[-1][0] += run
            else:
                extents.append([run, flags])

    ask = getattr(h, "block_status_64", h.block_status)
    ask(length, offset, on_extents)
    hole = nbd.STATE_HOLE | nbd.STATE_ZERO
    expected = [[task["data_end"], 0], [size - task["data_end"], hole]]
    assert extents == expected, f"extents {extents}, expected {expected}"
elif operation == "cache":
    assert h.can_cache(), "cache is not offered"
    h.cache(length, offset)
    base()
else:
    sys.exit(f"no operation {operation}")

# Exits without a disconnect request, so that only the operation itself makes its data durable.
os._exit(0)
