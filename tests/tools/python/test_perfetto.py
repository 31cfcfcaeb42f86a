"""Traces of replay in Perfetto's format, held to the schema of the package `perfetto` and to the Chrome trace of the same plan."""
import collections
import json
import os
import pathlib
import subprocess

import pytest

import moe_plan

schema = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason="traces of Perfetto: no perfetto from PyPI")
google = pytest.importorskip("google.protobuf.unknown_fields")

MOST_BYTES_PER_EVENT = 5e6 / 88_000


class Trace:
    """The trace of one plan in both formats; names and tracks are looked up as a viewer does."""

    def __init__(self, folder):
        found = moe_plan.search("tiny-qwen3-moe", "h100", gpus=8, gbs=64, seq=1024, precision="bf16", top=1,
                                fix={"pp": 2, "ep": 2, "tp": 1, "mbs": 2})
        self.replayed = moe_plan.replay(found.plans[0], trace=folder / "t.pftrace")
        moe_plan.replay(found.plans[0], trace=folder / "t.json")
        self.bytes = (folder / "t.pftrace").read_bytes()
        self.packets = list(schema.Trace.FromString(self.bytes).packet)
        chrome = json.loads((folder / "t.json").read_text())
        self.step = chrome["metadata"]["step_seconds"]
        self.rows = [event for event in chrome["traceEvents"] if event["ph"] == "X"]
        self.streams = {event["tid"]: event["args"]["name"] for event in chrome["traceEvents"] if event.get("name") == "thread_name"}
        self.tracks = {packet.track_descriptor.uuid: packet.track_descriptor for packet in self.packets
                       if packet.HasField("track_descriptor")}
        self.slices, self.counts = self.read()

    def read(self):
        """(track, name, categories, begin, end, event) of each slice, and (time, value) by counter's track."""
        names, categories = {}, {}
        opened, slices, counts = {}, [], collections.defaultdict(list)
        for packet in self.packets:
            names.update((entry.iid, entry.name) for entry in packet.interned_data.event_names)
            categories.update((entry.iid, entry.name) for entry in packet.interned_data.event_categories)
            if not packet.HasField("track_event"):
                continue
            event, time = packet.track_event, packet.timestamp
            assert event.track_uuid in self.tracks
            if event.type == event.TYPE_SLICE_BEGIN:
                assert packet.sequence_flags & packet.SEQ_NEEDS_INCREMENTAL_STATE
                assert event.track_uuid not in opened  # ops of a stream follow each other
                opened[event.track_uuid] = (names[event.name_iid], [categories[iid] for iid in event.category_iids], time, event)
            elif event.type == event.TYPE_SLICE_END:
                name, of, begin, first = opened.pop(event.track_uuid)
                assert time >= begin
                slices.append((event.track_uuid, name, of, begin, time, first))
            else:
                assert event.type == event.TYPE_COUNTER and self.tracks[event.track_uuid].HasField("counter")
                counts[event.track_uuid].append(
                    (time, event.double_counter_value if event.HasField("double_counter_value") else event.counter_value))
        assert not opened
        return slices, counts

    def path(self, track):
        """Names from the step's track down to this one."""
        names = []
        while track:
            names.insert(0, self.tracks[track].name)
            track = self.tracks[track].parent_uuid
        return names


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return Trace(tmp_path_factory.mktemp("trace"))


def test_every_field_is_one_of_the_schema(trace):
    def check(message):
        assert len(google.UnknownFieldSet(message)) == 0, message
        for field, value in message.ListFields():
            if field.type == field.TYPE_MESSAGE:
                for inner in value if field.is_repeated else [value]:
                    check(inner)

    for packet in trace.packets:
        assert packet.WhichOneof("data") in ("track_descriptor", "track_event")
        assert packet.trusted_packet_sequence_id == 1
        check(packet)
    assert trace.packets[0].sequence_flags == schema.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED


def test_slices_are_the_rows_of_the_chrome_trace(trace):
    def near(microseconds):
        return round(microseconds * 1000)

    expected = sorted((row["pid"], trace.streams[row["tid"]], near(row["ts"]), near(row["ts"] + row["dur"]), row["name"], row["cat"],
                       f"micro-batch {row['args']['micro_batch']}", row["args"]["layer"], row["args"]["phase"]) for row in trace.rows)
    found = []
    for track, name, categories, begin, end, _ in trace.slices:
        if trace.path(track) == ["predicted step"]:
            assert name == "step" and begin == 0 and end == pytest.approx(trace.step * 1e9, abs=1)
            continue
        root, rank, stream = trace.path(track)
        kind, *layer, phase = name.split()
        found.append((int(rank.split()[1]), stream, begin, end, kind, *categories, int(layer[0][1:]) if layer else -1, phase))
    assert len(found) == len(expected) > 1000
    for one, other in zip(sorted(found), expected):
        assert abs(one[2] - other[2]) <= 1 and abs(one[3] - other[3]) <= 1  # both round to their own unit
        assert one[:2] + one[4:] == other[:2] + other[4:]


def test_arrows_lead_from_a_send_to_its_receive(trace):
    leave, arrive = {}, {}
    for track, name, _, begin, end, event in trace.slices:
        for flow in event.flow_ids:
            assert name.startswith("send") and flow not in leave
            leave[flow] = (trace.path(track)[1], begin)
        for flow in event.terminating_flow_ids:
            assert name.startswith("recv") and flow not in arrive
            arrive[flow] = (trace.path(track)[1], end)
    assert leave.keys() == arrive.keys() and len(leave) == sum(row["name"] == "send" for row in trace.rows) > 8
    for flow, (rank, begin) in leave.items():
        assert arrive[flow][0] != rank and arrive[flow][1] >= begin


def counters_of(trace, rank, word):
    return {trace.path(track)[2].removeprefix(word + " "): values for track, values in trace.counts.items()
            if trace.path(track)[1] == rank and trace.path(track)[2].startswith(word + " ")}


def test_memory_is_counted_by_class(trace):
    fullest = f"(stage {trace.replayed.memory.pipeline_rank},"
    rank, = [name for name in {trace.path(track)[1] for track in trace.counts} if fullest in name]
    memory = counters_of(trace, rank, "memory")
    planned = trace.replayed.memory
    assert max(value for _, value in memory["weights"]) == pytest.approx(planned.weights.gib, rel=1e-6)
    assert max(value for _, value in memory["optimizer"]) == pytest.approx(planned.optimizer.gib, rel=1e-6)
    saved = [value for _, value in memory["saved activations"]]
    assert min(saved) < 0.5 * max(saved) and max(saved) <= planned.saved.gib * 1.000001
    for track in trace.counts:
        assert trace.tracks[track].counter.unit_name == ("GiB" if trace.path(track)[2].startswith("memory") else "MB/s")


def test_links_count_while_they_move_and_rest_at_the_end(trace):
    for rank in {trace.path(track)[1] for track in trace.counts}:
        links = counters_of(trace, rank, "link")
        assert {"expert", "data"} <= links.keys() and ("pipeline_in" in links or "pipeline_out" in links)
        for values in links.values():
            assert [time for time, _ in values] == sorted(time for time, _ in values)
            assert values[-1][1] == 0 and 0 < max(value for _, value in values) < 1e6


def test_ranks_and_their_tracks_have_an_order(trace):
    for parent in trace.tracks.values():
        children = [track for track in trace.tracks.values() if track.parent_uuid == parent.uuid]
        assert parent.child_ordering == schema.TrackDescriptor.EXPLICIT
        assert [track.sibling_order_rank for track in children] == sorted({track.sibling_order_rank for track in children})
    ranks = [int(track.name.split()[1]) for track in trace.tracks.values() if track.name.startswith("rank ")]
    assert ranks == sorted(ranks) and len(ranks) == 2


def test_a_measured_step_has_all_its_ranks_and_arrows(tmp_path):
    def command(*words):
        subprocess.run([os.environ["MOE_PLAN"], *words, "--quiet"], check=True, cwd=tmp_path, capture_output=True)

    plan = moe_plan.search("tiny-qwen3-moe", "cpu-local", gpus=4, gbs=16, seq=64, precision="fp32", fix={"pp": 2}, top=1).plans[0].plan
    plan.write(tmp_path / "plan.json")
    command("tokenize", str(pathlib.Path(os.environ["SOURCE"]) / "LICENSE"), "--out", "text")
    command("execute", "plan.json", "--data", "text", "--steps", "2", "--trace", "t.pftrace")
    packets = schema.Trace.FromString((tmp_path / "t.pftrace").read_bytes()).packet
    names = [packet.track_descriptor.name for packet in packets if packet.HasField("track_descriptor")]
    assert names[0] == "measured step"
    assert [name.split(" (")[0] for name in names if name.startswith("rank ")] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    leave = [flow for packet in packets for flow in packet.track_event.flow_ids]
    arrive = [flow for packet in packets for flow in packet.track_event.terminating_flow_ids]
    assert sorted(leave) == sorted(arrive) and len(set(leave)) == len(leave) > 0


def test_events_take_few_bytes(tmp_path):
    """88,000 events of one rank in under 5 MB, counters and names included."""
    plan = moe_plan.search("Qwen3-30B-A3B", "h100", gpus=16, gbs=1024, seq=4096, precision="bf16", top=1,
                           fix={"pp": 1, "ep": 8, "tp": 1, "mbs": 1}).plans[0]
    moe_plan.replay(plan, trace=tmp_path / "t.pftrace")
    moe_plan.replay(plan, trace=tmp_path / "t.json")
    events = (tmp_path / "t.json").read_text().count('"ph":"X"')
    assert events > 50_000
    assert (tmp_path / "t.pftrace").stat().st_size / events < MOST_BYTES_PER_EVENT
