"""Times of calls that run in turn on one GPU, for the scripts that hold ours beside PyTorch's."""
import torch


def medians(calls, repeats):
    """Milliseconds of each call, the median over `repeats` rounds after two to warm up."""
    times = [[] for _ in calls]
    for call in calls:
        call(), call()
    for _ in range(repeats):
        for call, events in zip(calls, times):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            events.append((start, end))
    torch.cuda.synchronize()
    return [sorted(s.elapsed_time(e) for s, e in events)[len(events) // 2] for events in times]
