"""Checks that the server behaves as libnbd requires, with one style of replies and one kind of connection.

The argument is a JSON object: how to connect, the exports, and the server's process id. Prints a line for each
check, "ok NAME" or "failed NAME: WHY". The last check kills the server.
"""
import errno
import json
import os
import random
import signal
import sys
import time
import traceback

import nbd

task = json.loads(sys.argv[1])
STYLE, TLS, SIZE, DATA_END = task["style"], task["tls"], task["size"], task["data_end"]
STRUCTURED = STYLE != "Simple"
LARGE = task["large_size"]
MIB = 1 << 20
# Features of libnbd 1.16 and 1.18: negotiating options one by one, and lengths of 64 bits.
KNOWS_OPTIONS = hasattr(nbd.NBD, "opt_structured_reply")
KNOWS_EXTENDED = hasattr(nbd.NBD, "set_request_extended_headers")
# With this strict mode, libnbd sends invalid requests too, and still sets the flag for the payload of a write.
LENIENT = getattr(nbd, "STRICT_AUTO_FLAG", 0)


def prepare(export="vm1", contexts=(), options=False, style=STYLE):
    """An NBD handle that is not connected yet."""
    h = nbd.NBD()
    h.set_export_name(export)
    h.set_request_structured_replies(style != "Simple")
    if KNOWS_EXTENDED:
        h.set_request_extended_headers(style == "Extended")
    for context in contexts:
        h.add_meta_context(context)
    h.set_opt_mode(options)
    return h


def connect(h):
    if TLS:
        h.set_tls(nbd.TLS_REQUIRE)
        h.set_tls_certificates(task["certificates"])
        h.connect_tcp("127.0.0.1", str(task["port"]))
    else:
        h.connect_unix(task["socket"])
    return h


def handle(*arguments, **words):
    return connect(prepare(*arguments, **words))


def equal(found, expected):
    assert found == expected, f"{found!r} and not {expected!r}"


def refuses(code, call, *arguments):
    """Checks that the call fails with one of these error names; if `code` is None, with any error."""
    try:
        call(*arguments)
    except nbd.Error as error:
        codes = (code,) if isinstance(code, str) else code
        assert code is None or error.errno in codes, f"{error.errno} and not {code}: {error}"
        return
    raise AssertionError(f"accepted, and not refused with {code}")


def complete(h, cookie):
    while not h.aio_command_completed(cookie):
        h.poll(-1)


CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def when(condition):
    """Adds the check only if the condition holds."""
    return check if condition else lambda function: function


@check
def what_is_negotiated():
    h = handle()
    equal(h.get_protocol(), "newstyle-fixed")
    equal(h.get_structured_replies_negotiated(), STRUCTURED)
    equal(h.get_tls_negotiated(), TLS)
    if KNOWS_EXTENDED:
        equal(h.get_extended_headers_negotiated(), STYLE == "Extended")


@when(not TLS and STYLE == "Simple")
def handshakes_of_older_clients():
    for flags, protocol in [(0, "newstyle"), (nbd.HANDSHAKE_FLAG_FIXED_NEWSTYLE, "newstyle-fixed")]:
        h = prepare()
        h.set_handshake_flags(flags)
        connect(h)
        equal(h.get_protocol(), protocol)
        equal(h.get_size(), SIZE)
        equal(bytes(h.pread(512, 0)), b"\x11" * 512)


@check
def flags_of_a_disk_and_of_a_snapshot():
    h = handle()
    equal(h.is_read_only(), False)
    for flag in ["flush", "fua", "trim", "zero", "fast_zero", "cache", "multi_conn"]:
        equal((flag, getattr(h, f"can_{flag}")()), (flag, True))
    equal(h.can_df(), STRUCTURED)
    equal(h.is_rotational(), False)
    equal(handle("vm1@before").is_read_only(), True)


@check
def block_sizes():
    h = handle()
    equal([h.get_block_size(kind) for kind in [nbd.SIZE_MINIMUM, nbd.SIZE_PREFERRED, nbd.SIZE_MAXIMUM]],
          [1, 4096, 32 * MIB])


@check
def name_and_description():
    h = prepare()
    h.set_full_info(True)
    connect(h)
    equal(h.get_canonical_export_name(), "vm1")
    assert h.get_export_description()


@check
def list_of_exports():
    h = handle(options=True)
    names = []
    h.opt_list(lambda name, description: names.append(name))
    equal(sorted(names), task["exports"])
    # The connection accepts another option afterwards.
    h.opt_go()
    equal(h.get_size(), SIZE)


@check
def information_about_exports():
    h = handle("missing", options=True)
    refuses(None, h.opt_info)
    refuses(None, h.get_size)
    for name, size, read_only in [("large", LARGE, False), ("vm1@before", SIZE, True), ("vm1", SIZE, False)]:
        h.set_export_name(name)
        h.opt_info()
        equal((h.get_size(), h.is_read_only()), (size, read_only))
    h.opt_go()
    equal(bytes(h.pread(1, 0)), b"\x11")


@check
def a_missing_export_leaves_the_handshake_open():
    h = handle("missing", options=True)
    refuses("ENOENT", h.opt_go)
    h.set_export_name("x" * 4096)
    refuses(None, h.opt_go)
    h.set_export_name("vm1")
    h.opt_go()
    equal(h.get_size(), SIZE)


@check
def leaving_before_an_export_is_chosen():
    h = handle(options=True)
    h.opt_abort()
    equal(h.aio_is_closed(), True)


@when(STRUCTURED)
def list_of_contexts():
    for queries, expected in [
        ((), ["base:allocation", "lamina:dirty:before", "qemu:dirty-bitmap:before"]),
        (("base:",), ["base:allocation"]),
        (("qemu:",), ["qemu:dirty-bitmap:before"]),
        (("x-unknown:", "base:unknown"), []),
        (("base:allocation", "lamina:dirty:before"), ["base:allocation", "lamina:dirty:before"]),
    ]:
        h = handle(contexts=queries, options=True)
        names = []
        h.opt_list_meta_context(names.append)
        equal((queries, sorted(names)), (queries, expected))


@when(STRUCTURED)
def contexts_that_are_chosen():
    h = handle(contexts=["base:allocation", "x-unknown:context"])
    equal(h.can_meta_context("base:allocation"), True)
    equal(h.can_meta_context("x-unknown:context"), False)
    equal(h.can_meta_context("lamina:dirty:before"), False)


@when(STRUCTURED and KNOWS_OPTIONS)
def contexts_chosen_again():
    h = handle(options=True)
    h.set_request_meta_context(False)
    chosen = []
    h.opt_set_meta_context_queries(["base:allocation"], chosen.append)
    h.opt_set_meta_context_queries(["lamina:dirty:before", "x-unknown:context"], chosen.append)
    equal(chosen, ["base:allocation", "lamina:dirty:before"])
    h.opt_go()
    equal(h.can_meta_context("base:allocation"), False)
    equal(h.can_meta_context("lamina:dirty:before"), True)


@when(TLS and KNOWS_OPTIONS)
def tls_as_an_option():
    h = prepare(options=True, style="Simple")
    h.set_tls(nbd.TLS_DISABLE)
    h.set_tls_certificates(task["certificates"])
    h.connect_tcp("127.0.0.1", str(task["port"]))
    refuses(None, h.opt_list, lambda name, description: 0)
    refuses(None, h.opt_info)
    equal(h.opt_starttls(), True)
    equal(h.get_tls_negotiated(), True)
    equal(h.opt_starttls(), False)
    if STRUCTURED:
        equal(h.opt_structured_reply(), True)
    h.opt_go()
    equal(h.get_structured_replies_negotiated(), STRUCTURED)
    equal(bytes(h.pread(1, 0)), b"\x11")


@when(KNOWS_OPTIONS and STYLE == "Structured")
def structured_replies_as_an_option():
    h = handle(options=True, style="Simple")
    equal(h.get_structured_replies_negotiated(), False)
    equal(h.opt_structured_reply(), True)
    # The server may accept or refuse the option a second time. The connection stays usable in either case.
    h.opt_structured_reply()
    equal(h.get_structured_replies_negotiated(), True)
    h.opt_go()
    equal(bytes(h.pread(1, 0)), b"\x11")


@when(STYLE == "Extended")
def extended_headers_as_an_option():
    h = handle(options=True, style="Simple")
    equal(h.opt_extended_headers(), True)
    equal(h.get_extended_headers_negotiated(), True)
    # Extended headers include structured replies, so this option changes nothing.
    h.opt_structured_reply()
    equal(h.get_extended_headers_negotiated(), True)
    h.opt_go()
    equal(bytes(h.pread(1, 0)), b"\x11")


def chunks(h, length, offset, flags=0):
    """Reads a range; returns its bytes, and the chunks of the reply as (offset, length, kind), sorted by offset."""
    seen = []

    def on_chunk(data, start, status, error):
        seen.append((start, len(data), status))
        equal(error.value, 0)

    data = bytes(h.pread_structured(length, offset, on_chunk, flags))
    return data, sorted(seen)


@check
def reads_in_chunks():
    h = handle("vm1@before")
    # The range has the end of the data, and the beginning of the hole after the data.
    start, length = DATA_END - 64 * 1024, 128 * 1024
    data, seen = chunks(h, length, start)
    equal(data, b"\x22" * (64 * 1024) + bytes(64 * 1024))
    position = start
    for offset, size, _ in seen:
        equal(offset, position)
        position += size
    equal(position, start + length)
    kinds = {kind for _, _, kind in seen}
    assert kinds <= {nbd.READ_DATA, nbd.READ_HOLE}, kinds
    if STRUCTURED:
        equal(seen[-1][2], nbd.READ_HOLE)
        # With the flag DF ("don't fragment"), the reply is one chunk.
        data, seen = chunks(h, length, start, nbd.CMD_FLAG_DF)
        equal(data, b"\x22" * (64 * 1024) + bytes(64 * 1024))
        equal(len(seen), 1)


def status(h, length, offset=0, context="base:allocation", flags=0):
    """Extents of one context as [length, flags], until the range is covered."""
    out = []
    end = offset + length

    def on_extents(name, start, entries, error):
        if name == context:
            if entries and not isinstance(entries[0], tuple):
                entries = list(zip(entries[::2], entries[1::2]))
            out.extend(entries)

    while offset < end:
        before = sum(extent[0] for extent in out)
        step = end - offset if STYLE == "Extended" else min(end - offset, 1 << 31)
        if KNOWS_EXTENDED:
            h.block_status_64(step, offset, on_extents, flags)
        else:
            h.block_status(step, offset, on_extents, flags)
        progress = sum(extent[0] for extent in out) - before
        assert progress > 0, "no progress"
        offset += progress
    merged = []
    for run, state in out:
        if merged and merged[-1][1] == state:
            merged[-1][0] += run
        else:
            merged.append([run, state])
    merged[-1][0] -= offset - end
    return merged


HOLE = nbd.STATE_HOLE | nbd.STATE_ZERO


@when(STRUCTURED)
def allocation():
    equal(status(handle("vm1@before", contexts=["base:allocation"]), SIZE), [[DATA_END, 0], [SIZE - DATA_END, HOLE]])


@when(STRUCTURED)
def allocation_of_a_large_disk():
    h = handle("large", contexts=["base:allocation"])
    half = LARGE // 2
    equal(status(h, LARGE), [[half, HOLE], [4096, 0], [LARGE - half - 4096, HOLE]])


@when(STYLE == "Extended")
def allocation_of_a_large_disk_in_one_reply():
    h = handle("large", contexts=["base:allocation"])
    replies = []
    h.block_status_64(LARGE, 0, lambda name, start, entries, error: replies.append(entries))
    half = LARGE // 2
    equal(replies, [[(half, HOLE), (4096, 0), (LARGE - half - 4096, HOLE)]])


@when(STRUCTURED)
def one_extent():
    h = handle("vm1@before", contexts=["base:allocation"])
    found = []
    h.block_status(SIZE, 0, lambda name, start, entries, error: found.extend(entries), nbd.CMD_FLAG_REQ_ONE)
    equal(found, [DATA_END, 0])


@when(STRUCTURED)
def changes_since_a_snapshot():
    names = ["lamina:dirty:before", "qemu:dirty-bitmap:before"]
    h = handle("vm1", contexts=names)
    for name in names:
        found = status(h, SIZE, context=name)
        equal(found, [[MIB + 65536, 0], [65536, 1], [SIZE - MIB - 131072, 0]])


@when(STYLE == "Extended")
def status_of_chosen_contexts():
    h = handle("vm1", contexts=["base:allocation", "lamina:dirty:before"])
    equal(h.can_block_status_payload(), True)
    for wanted in [["base:allocation"], ["lamina:dirty:before"], ["base:allocation", "lamina:dirty:before"]]:
        seen = set()
        h.block_status_filter(SIZE, 0, wanted, lambda name, start, entries, error: seen.add(name))
        equal(sorted(seen), sorted(wanted))


@when(STRUCTURED)
def status_without_a_context_is_refused():
    h = handle()
    h.set_strict_mode(LENIENT)
    refuses(("EINVAL", "ENOTSUP"), h.block_status, SIZE, 0, lambda *words: 0)
    equal(bytes(h.pread(1, 0)), b"\x11")


@check
def what_the_server_refuses():
    h, large = handle("work"), handle("large")
    h.set_strict_mode(LENIENT)
    large.set_strict_mode(LENIENT)
    beyond = SIZE - 512
    for name, code, call, arguments in [
        ("read beyond the end", "EINVAL", h.pread, (1024, beyond)),
        ("write beyond the end", ("ENOSPC", "EINVAL"), h.pwrite, (bytes(1024), beyond)),
        ("trim beyond the end", "EINVAL", h.trim, (1024, beyond)),
        ("zero beyond the end", ("ENOSPC", "EINVAL"), h.zero, (1024, beyond)),
        ("cache beyond the end", "EINVAL", h.cache, (1024, beyond)),
        ("read at the end of numbers", "EINVAL", h.pread, (512, (1 << 63) - 512)),
        ("a flag that does not exist", "EINVAL", h.trim, (512, 0, 1 << 12)),
        ("fast zero of a trim", "EINVAL", h.trim, (512, 0, nbd.CMD_FLAG_FAST_ZERO)),
        ("more than a payload", ("EINVAL", "EOVERFLOW"), large.pread, (33 * MIB, 0)),
    ]:
        try:
            refuses(code, call, *arguments)
        except AssertionError as why:
            raise AssertionError(f"{name}: {why}") from why
    equal(bytes(h.pread(512, beyond)), bytes(512))


@check
def requests_of_no_length_do_no_harm():
    h = handle("work")
    h.set_strict_mode(LENIENT)
    for call, arguments in [(h.pread, (0, 0)), (h.pwrite, (b"", 0)), (h.trim, (0, 0)), (h.zero, (0, 0)), (h.cache, (0, 0))]:
        try:
            call(*arguments)
        except nbd.Error as error:
            equal(error.errno, "EINVAL")
    equal(bytes(h.pread(1, 0)), b"\x11")


@check
def a_snapshot_is_not_written():
    h = handle("vm1@before")
    h.set_strict_mode(LENIENT)
    for call, arguments in [(h.pwrite, (bytes(512), 0)), (h.trim, (4096, 0)), (h.zero, (4096, 0))]:
        refuses("EPERM", call, *arguments)
    h.flush()
    equal(bytes(h.pread(512, 0)), b"\x11" * 512)


@check
def the_largest_payload():
    h = handle("large")
    data = random.Random(1).randbytes(MIB) * 32
    h.pwrite(data, 8 * MIB - 1)
    equal(bytes(h.pread(len(data), 8 * MIB - 1)) == data, True)
    h.trim(64 * MIB, 0)


@when(STYLE == "Extended")
def a_write_that_does_not_say_that_it_has_a_payload():
    # QEMU sends writes with extended headers but without the flag for the payload.
    h = handle("large")
    h.set_strict_mode(0)
    h.pwrite(b"\x77" * 70_000, 3 * MIB + 1)
    equal(bytes(h.pread(70_002, 3 * MIB)), b"\0" + b"\x77" * 70_000 + b"\0")
    h.trim(4 * MIB, MIB)


@check
def many_requests_at_once():
    """Sends writes, zero requests and reads over several connections at the same time; then checks every byte."""
    generator = random.Random(2)
    handles = [handle("work") for _ in range(4)]
    model = bytearray(bytes(handles[0].pread(SIZE, 0)))
    part = SIZE // len(handles)
    called = []
    for _ in range(12):
        asked = []
        for number, h in enumerate(handles):
            # The requests do not overlap, because requests in flight have no order.
            for slot in range(16):
                space = part // 16
                start = number * part + slot * space
                length = generator.randint(1, space // 3)
                offset = start + generator.randint(0, space - length)
                kind = generator.choice(["write", "write", "zero", "read"])
                done = lambda error: called.append(error.value) or 1
                if kind == "write":
                    data = generator.randbytes(length)
                    model[offset:offset + length] = data
                    buffer = nbd.Buffer.from_bytearray(bytearray(data))
                    asked.append((h, h.aio_pwrite(buffer, offset, completion=done), None, buffer))
                elif kind == "zero":
                    model[offset:offset + length] = bytes(length)
                    asked.append((h, h.aio_zero(length, offset, completion=done), None, None))
                else:
                    buffer = nbd.Buffer(length)
                    asked.append((h, h.aio_pread(buffer, offset, completion=done), bytes(model[offset:offset + length]), buffer))
        # The completion functions return 1, so libnbd retires each request when it is complete.
        for h in handles:
            while h.aio_in_flight() > 0:
                h.poll(-1)
        for _, _, expected, buffer in asked:
            if expected is not None:
                equal(bytes(buffer.to_bytearray()) == expected, True)
    equal(len(called), 12 * 64)
    equal(set(called), {0})
    # After a flush on one connection, the other connections read the flushed data.
    handles[0].flush()
    equal(bytes(handles[3].pread(SIZE, 0)) == bytes(model), True)


@check
def connections_come_and_go():
    for turn in range(40):
        h = handle()
        if turn % 2:
            h.pread(512, turn * 512)
            h.shutdown()
        else:
            # The client closes the connection without a disconnect request, while a read is under way.
            h.aio_pread(nbd.Buffer(MIB), 0)
            del h
    equal(bytes(handle().pread(1, 0)), b"\x11")


@check
def leaving_with_requests_under_way():
    h = handle("work")
    cookies = [h.aio_pread(nbd.Buffer(65536), number * 65536) for number in range(16)]
    h.shutdown(nbd.SHUTDOWN_ABANDON_PENDING)
    equal(h.aio_in_flight(), 0)
    assert h.aio_is_closed() or h.aio_is_dead()
    assert len(cookies) == 16


@check
def the_server_dies():
    h = handle("work")
    os.kill(task["pid"], signal.SIGSTOP)
    folder = f"/proc/{task['pid']}/task"
    while not all("(stopped)" in open(f"{folder}/{thread}/status").read() for thread in os.listdir(folder)):
        time.sleep(0.001)
    cookies = [h.aio_pread(nbd.Buffer(65536), number * 65536) for number in range(16)]
    os.kill(task["pid"], signal.SIGKILL)
    for cookie in cookies:
        refuses(None, complete, h, cookie)
    assert h.aio_is_dead() or h.aio_is_closed()
    refuses(None, h.pread, 512, 0)


for function in CHECKS:
    name = function.__name__.replace("_", " ")
    try:
        function()
        print(f"ok {name}", flush=True)
    except Exception as why:
        place = traceback.extract_tb(why.__traceback__)[-1]
        print(f"failed {name}: {type(why).__name__} {why} (line {place.lineno})".replace("\n", " "), flush=True)
