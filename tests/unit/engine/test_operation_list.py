"""What is queued where, operation by operation, and where held groups leave.

A line is a stream and what is queued on it. Storages are `t0`, `t1`, ... and events `e0`, `e1`, ... in the order in which they
were made; bytes are given where they are not all of a storage. `free` stands where the memory goes back to the allocator.
"""

import pytest
import torch
from support.recording import RecordingCpuDevice
from support.schedules import run_layers, sine, sine_of_columns
from support.sites import Sites
from support.streams import FAR, NBYTES, Program

EXPECTED = """
# Forward of the first microbatch.
compute  mul weight -> t1
compute  sin t1 -> t2
host     allocate host
compute  record e0
d2h      wait e0 (SOURCE_UNWRITTEN)
d2h      copy t1 -> host[0:4096]
d2h      record e1
# The second group saves columns: they are gathered, and the copy to the host reads the packed bytes.
compute  sin t2[0:4068] -> t3
compute  allocate t4 (512 bytes)
compute  copy_ t4 t2[0:4068] -> t4
compute  record e2
d2h      wait e2 (SOURCE_UNWRITTEN)
d2h      copy t4 -> host[4096:4608]
d2h      record e3
# Past the window: compute waits for the oldest copy, and its source goes.
compute  wait e1 (SOURCE_STILL_COPIED)
compute  free t1
compute  free t2
# The third group.
compute  sin t3 -> t5
compute  record e4
d2h      wait e4 (SOURCE_UNWRITTEN)
d2h      copy t3 -> host[4608:5120]
d2h      record e5
# Forward of the second microbatch.
compute  mul weight -> t6
compute  sin t6 -> t7
compute  record e6
d2h      wait e6 (SOURCE_UNWRITTEN)
d2h      copy t6 -> host[5120:9216]
d2h      record e7
# Past the window: two copies have to go.
compute  wait e3 (SOURCE_STILL_COPIED)
compute  free t4
compute  wait e5 (SOURCE_STILL_COPIED)
compute  free t3
compute  sin t7[0:4068] -> t8
compute  allocate t9 (512 bytes)
compute  copy_ t9 t7[0:4068] -> t9
compute  record e8
d2h      wait e8 (SOURCE_UNWRITTEN)
d2h      copy t9 -> host[9216:9728]
d2h      record e9
compute  wait e7 (SOURCE_STILL_COPIED)
compute  free t6
compute  free t7
compute  sin t8 -> t10
compute  record e10
d2h      wait e10 (SOURCE_UNWRITTEN)
d2h      copy t8 -> host[9728:10240]
d2h      record e11
# Backward of the first: its third group is wanted, and its second, small enough, is prefetched.
compute  ones_like -> t11
compute  allocate t12 (512 bytes)
compute  record e12
h2d      wait e12 (BUFFER_STILL_USED)
h2d      wait e5 (BLOCK_UNWRITTEN)
h2d      copy host[4608:5120] -> t12
h2d      record e13
compute  allocate t13 (512 bytes)
compute  record e14
h2d      wait e14 (BUFFER_STILL_USED)
h2d      wait e3 (BLOCK_UNWRITTEN)
h2d      copy host[4096:4608] -> t13
h2d      record e15
compute  wait e13 (BUFFER_UNFILLED)
compute  cos t12 -> t14
compute  mul t11 t14 -> t15
compute  free t12
compute  free t14
# Backward has left the third group: the first is prefetched.
compute  allocate t16 (4096 bytes)
compute  record e16
h2d      wait e16 (BUFFER_STILL_USED)
h2d      wait e1 (BLOCK_UNWRITTEN)
h2d      copy host[0:4096] -> t16
h2d      record e17
# Backward takes what was gathered, and puts it in place.
compute  wait e15 (BUFFER_UNFILLED)
compute  allocate t17 (4068 bytes)
compute  copy_ t17 t13 -> t17
compute  record e18
compute  free t13
compute  cos t17 -> t18
compute  mul t15 t18 -> t19
compute  free t15
compute  free t17
compute  free t18
compute  slice_backward t19 -> t20
compute  free t19
# Backward takes the first group.
compute  wait e17 (BUFFER_UNFILLED)
compute  cos t16 -> t21
compute  mul t20 t21 -> t22
compute  free t16
compute  free t20
compute  free t21
compute  mul t22 -> t23
compute  free t5
compute  free t11
compute  free t22
# Backward of the second: its third group is still on the device and is recalled, the second is prefetched.
compute  ones_like -> t24
compute  allocate t25 (512 bytes)
compute  record e19
h2d      wait e19 (BUFFER_STILL_USED)
h2d      wait e9 (BLOCK_UNWRITTEN)
h2d      copy host[9216:9728] -> t25
h2d      record e20
compute  cos t8 -> t26
compute  mul t24 t26 -> t27
compute  free t26
# The first is prefetched.
compute  allocate t28 (4096 bytes)
compute  record e21
h2d      wait e21 (BUFFER_STILL_USED)
h2d      wait e7 (BLOCK_UNWRITTEN)
h2d      copy host[5120:9216] -> t28
h2d      record e22
compute  wait e20 (BUFFER_UNFILLED)
compute  allocate t29 (4068 bytes)
compute  copy_ t29 t25 -> t29
compute  record e23
compute  free t25
compute  cos t29 -> t30
compute  mul t27 t30 -> t31
compute  free t27
compute  free t29
compute  free t30
compute  slice_backward t31 -> t32
compute  free t31
compute  wait e22 (BUFFER_UNFILLED)
compute  cos t28 -> t33
compute  mul t32 t33 -> t34
compute  free t28
compute  free t32
compute  free t33
compute  mul t34 -> t35
compute  free t34
compute  add_ t23 t35 -> t23
compute  free t10
compute  free t24
compute  free t35
"""


def test_two_microbatches_of_three_groups_queue_exactly_these_operations():
    device = RecordingCpuDevice()
    program = Program(device)
    engine, outputs = program.make_engine(window=NBYTES, prefetch=NBYTES), []
    with device.recording():
        weight = device.name(program.leaf(), "weight")
        device.operations.clear()
        for microbatch in range(2):
            sites = Sites(engine, microbatch=microbatch)
            h = sites(sine, program.run(lambda w: w * 2, weight))
            h = sites(sine_of_columns, h)
            outputs.append(sites(sine, h))
            del h
        while outputs:
            program.backward(outputs.pop(0))
    found = list(device.operations)
    engine.close()
    expected = [line for line in EXPECTED.splitlines() if line and not line.startswith("#")]
    assert found == expected


TOGETHER = """
# What backward wants now goes first, by itself: its copy starts at once.
compute  allocate t5 (4096 bytes)
compute  record e6
h2d      wait e6 (BUFFER_STILL_USED)
h2d      wait e5 (BLOCK_UNWRITTEN)
h2d      copy host[8192:12288] -> t5
h2d      record e7
# What is prefetched shares one wait, and has an event each.
compute  allocate t6 (4096 bytes)
compute  allocate t7 (4096 bytes)
compute  record e8
h2d      wait e8 (BUFFER_STILL_USED)
h2d      wait e3 (BLOCK_UNWRITTEN)
h2d      copy host[4096:8192] -> t6
h2d      record e9
h2d      wait e1 (BLOCK_UNWRITTEN)
h2d      copy host[0:4096] -> t7
h2d      record e10
"""


def test_groups_that_come_back_together_wait_once_for_what_used_their_buffers():
    device = RecordingCpuDevice()
    program = Program(device)
    engine = program.make_engine(window=0, prefetch=FAR)
    with device.recording():
        sites = Sites(engine)
        h = program.run(lambda w: w * 2, program.leaf())
        for _ in range(3):
            h = sites(sine, h)
        device.collect()
        device.operations.clear()
        engine.approach_backward(sites.lane, sites.lane.groups[-1])
        found = list(device.operations)
        del h
    engine.close()
    assert found == [line for line in TOGETHER.splitlines() if line and not line.startswith("#")]


def list_copies_to_host(device: RecordingCpuDevice) -> list[str]:
    return [line for line in device.operations if line.startswith("d2h ") and " copy " in line]


def test_held_groups_leave_at_the_flush_in_the_order_in_which_they_ended():
    device = RecordingCpuDevice()
    program = Program(device)
    engine = program.make_engine(window=FAR)
    with device.recording():
        weight = program.leaf()
        sites = Sites(engine)
        names = ["first", "second", "third"]
        sources = [device.name(program.run(lambda w: w * 2, weight), name) for name in names]
        regions = [sites(sine, source, is_held=True) for source in sources]
        del sources
        assert list_copies_to_host(device) == []
        engine.flush()
        assert [line.split()[2] for line in list_copies_to_host(device)] == names
        engine.flush()  # nothing is left
        assert len(list_copies_to_host(device)) == 3
        del regions
    engine.close()


@pytest.mark.parametrize("place", ["d2h", "compute"])
def test_a_small_copy_that_the_framework_queues_after_a_hold_and_before_the_flush_is_ahead_of_all_large_ones(place):
    device = RecordingCpuDevice()
    program = Program(device)
    engine = program.make_engine(window=FAR)
    with device.recording():
        weight = program.leaf()
        counts, on_host = (torch.zeros(8, dtype=torch.uint8) for _ in range(2))
        before = len(device.operations)
        output = run_layers(program, Sites(engine), weight, is_held=True)
        held = device.operations[before:]
        stream = device.d2h_stream if place == "d2h" else device.current_stream()
        device.join(stream, device.current_stream())
        with device.copying_on(stream):
            device.copy_bytes(destination=device.name(on_host, "on_host"), source=device.name(counts, "counts"), stream=stream)
        small = len(device.operations)
        device.synchronize(device.record_event(stream))  # as the dispatcher of a MoE layer, which needs the counts on the host
        engine.flush()
        after = device.operations[small:]
        assert [line for line in held if line.startswith(("d2h ", "h2d ", "host "))] == []
        assert device.operations[small - 1].endswith("copy counts -> on_host")
        large = [line for line in after if " copy " in line]
        assert len(large) == 7  # two storages for each of three layers, and the weight, which is no parameter here
        assert all(line.startswith("d2h ") for line in large)
        program.backward(output)
        del output
    found = weight.grad
    assert device.unordered == []
    engine.close()

    program = Program(RecordingCpuDevice(), has_engine=False)
    weight = program.leaf()
    program.backward(run_layers(program, Sites(None), weight))
    assert torch.equal(found, weight.grad)


def test_held_groups_of_several_microbatches_leave_in_the_order_in_which_they_ended():
    device = RecordingCpuDevice()
    program = Program(device)
    engine = program.make_engine(window=FAR)
    with device.recording():
        weight = program.leaf()
        lanes = [Sites(engine, microbatch=microbatch) for microbatch in range(2)]
        outputs = []
        for name, sites in zip(["a0", "b0", "a1", "b1"], lanes * 2, strict=True):
            source = device.name(program.run(lambda w: w * 2, weight), name)
            outputs.append(sites(sine, source, is_held=True))
            del source
        engine.flush()
        assert [line.split()[2] for line in list_copies_to_host(device)] == ["a0", "b0", "a1", "b1"]
        del outputs
    engine.close()


def test_groups_that_are_not_held_leave_ahead_of_those_that_are():
    device = RecordingCpuDevice()
    program = Program(device)
    engine = program.make_engine(window=FAR)
    with device.recording():
        weight = program.leaf()
        sites = Sites(engine)
        held = sites(sine, device.name(program.run(lambda w: w * 2, weight), "held"), is_held=True)
        other = sites(sine, device.name(program.run(lambda w: w * 3, weight), "other"))
        engine.flush()
        assert [line.split()[2] for line in list_copies_to_host(device)] == ["other", "held"]
        del held, other
    engine.close()
