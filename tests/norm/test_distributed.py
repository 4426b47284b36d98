"""Two processes on PyTorch's own engines give what one process with the whole batch gives, to rounding."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.nn.modules._functions import SyncBatchNorm as SyncStatistics

import varprop as vp

from .networks import case
from .processes import SPLITS, WORLD, batch, full, normalized, parts_of, plain, run, train

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]
SMALL = 2500  # bytes: a few layers
DDP = nn.parallel.DistributedDataParallel


def sharded_blocks(model: Any, **settings: Any) -> Any:
    for block in model.blocks():
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def compiled_blocks(model: Any) -> Any:
    for block in model.blocks():
        fully_shard(block)
        block.compile(backend="eager")
    return fully_shard(model)


ENGINES: dict[str, Callable[[Any], nn.Module]] = {
    "DDP": DDP,
    "DDP, compiled": lambda model: torch.compile(DDP(model), backend="eager"),
    "fully_shard": fully_shard,
    "fully_shard, blocks": sharded_blocks,
    "fully_shard, blocks, kept": lambda model: sharded_blocks(model, reshard_after_forward=False),
    "fully_shard, blocks, offloaded": lambda model: sharded_blocks(
        model, offload_policy=CPUOffloadPolicy(pin_memory=False)
    ),
    "fully_shard, blocks, compiled": compiled_blocks,
}
CHECKPOINTED = ("DDP", "fully_shard", "fully_shard, blocks")
CASES = [(name, False, "paper") for name in ENGINES] + [(name, True, "paper") for name in CHECKPOINTED]
CASES += [(name, False, "deep") for name in ("DDP", "fully_shard, blocks")]


def trained_by_engines(rank: int) -> dict[Any, list[Tensor]]:
    found = {}
    for name, checkpointed, form in CASES:
        with parts_of(SMALL):
            model = normalized(form=form)
            model.checkpointed = checkpointed
            train(ENGINES[name](model), SPLITS[rank], processes=WORLD)
        found[name, checkpointed, form] = [full(p) for p in model.parameters()]
    return found


def all_that_is_tried(rank: int) -> dict[str, Any]:
    """First what rounds in float32: after bfloat16 torch may round otherwise."""
    order = (trained_in_turn, trained_in_float32, trained_by_engines, trained_in_low_precision, order_of_events)
    return {work.__name__: work(rank) for work in (*order, collectives, other_engines, compiled_order_of_events)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: Any) -> Any:
    """By two processes that are started once: the start takes longer than all that they try."""
    return run(all_that_is_tried, tmp_path_factory.mktemp("processes"))


@pytest.fixture(scope="module")
def by_one_process() -> dict[str, list[Tensor]]:
    models = {form: normalized(form=form) for form in ("paper", "deep")}
    for model in models.values():
        train(model, slice(None))
    return {form: [full(p) for p in model.parameters()] for form, model in models.items()}


@pytest.mark.compatibility("DDP")
@pytest.mark.compatibility("FSDP")
@pytest.mark.parametrize(("name", "checkpointed", "form"), CASES)
def test_two_processes_train_like_one(
    name: str, checkpointed: bool, form: str, found: Any, by_one_process: Any
) -> None:
    by_engines = found["trained_by_engines"]
    for ours, theirs in zip(by_engines[name, checkpointed, form], by_one_process[form], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def trained_in_low_precision(rank: int) -> dict[str, list[list[Tensor]]]:
    """By two processes, and by each alone with the whole batch."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    alone = dist.init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("each", "alone"))["alone"]
    found: dict[str, list[list[Tensor]]] = {}
    for mesh, part, processes in ((None, SPLITS[rank], WORLD), (alone, slice(None), 1)):
        models = {name: normalized(torch.float32) for name in ("float32", "policy", "autocast")}
        here: Any = {"processes": processes}
        train(sharded_blocks(models["float32"], mesh=mesh), part, dtype=torch.float32, **here)
        train(sharded_blocks(models["policy"], mp_policy=policy, mesh=mesh), part, dtype=torch.bfloat16, **here)
        with parts_of(SMALL):
            wrapped = models["autocast"] if mesh else DDP(models["autocast"])
            train(wrapped, part, dtype=torch.float32, autocast=True, **here)
        for name, model in models.items():
            found.setdefault(name, []).append([full(p) for p in model.parameters()])
    return found


def test_rounding_is_that_of_one_process(found: Any) -> None:
    """Sums over a batch are rounded where it is split: two processes are no farther from float64 than one is."""
    exact, start = normalized(), normalized(torch.float32)
    with torch.no_grad():
        for own, rounded in zip(exact.parameters(), start.parameters(), strict=True):
            own.copy_(rounded)
    train(exact, slice(None))
    expected = torch.cat([full(p).flatten() for p in exact.parameters()])
    for name, both in found["trained_in_low_precision"].items():
        two, one = (float((torch.cat([p.flatten() for p in own]) - expected).norm()) for own in both)
        assert two < 1.5 * one, (name, two, one)


def trained_in_float32(rank: int) -> dict[str, list[Tensor]]:
    found = {}
    for name in ("DDP", "fully_shard"):
        model = normalized(torch.float32)
        train(ENGINES[name](model), SPLITS[rank], processes=WORLD, dtype=torch.float32)
        found[name] = [full(p) for p in model.parameters()]
    return found


def trained_in_turn(_rank: int) -> list[Tensor]:
    """In the same processes: what ran before in that of the tests may have changed how torch rounds."""
    model = normalized(torch.float32)
    train(model, *SPLITS, dtype=torch.float32)
    return [full(p) for p in model.parameters()]


def test_processes_round_as_one_that_takes_the_parts_in_turn(found: Any) -> None:
    """So what float32 differs by from the whole batch at once is the order in which its sums are taken."""
    for name, parameters in found["trained_in_float32"].items():
        for ours, theirs in zip(parameters, found["trained_in_turn"], strict=True):
            assert torch.equal(ours, theirs), name


def order_of_events(_rank: int) -> dict[int, list[str]]:
    found = {}
    for size in (SMALL, 2**40):
        with parts_of(size):
            model = normalized()
            wrapped = DDP(model, bucket_cap_mb=0.002)
            events = Events()
            wrapped.register_comm_hook(None, events.send)
            model.stem.register_forward_hook(events.watch)
            for _ in range(3):  # buckets are put in the order of arrival after the first
                events.clear()
                wrapped(batch(0)).square().mean().backward()
            found[size] = list(events)
    return found


class Events(list[str]):
    """The order in which buckets are sent and the backward pass comes to the first layer."""

    def send(self, _state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations as strings
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        self.append("bucket")
        return allreduce_hook(dist.group.WORLD, bucket)

    def watch(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: self.append("first layer"))

    def compile(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        """A backend for torch.compile; the order in which the backward pass comes to its graphs."""
        from torch._dynamo.backends.debugging import aot_eager

        run = aot_eager(graph, inputs)

        def watched(*args: Any) -> Any:
            outputs = run(*args)
            torch.autograd.graph.register_multi_grad_hook(
                [out for out in outputs if out.requires_grad], lambda _: self.append("graph"), mode="any"
            )
            return outputs

        return watched


def test_gradients_leave_while_the_backward_pass_goes_on(found: Any) -> None:
    events = found["order_of_events"]
    assert events[SMALL].index("first layer") >= 2 and events[SMALL].count("bucket") > 3
    assert events[2**40][0] == "first layer"  # in one node all of them come at the end


def compiled_order_of_events(_rank: int) -> dict[int, list[str]]:
    torch._dynamo.reset()
    dist._DEFAULT_FIRST_BUCKET_BYTES = SMALL  # for good, in the last work of these processes
    found, data = {}, vp.Moments(torch.zeros(1, 16), torch.ones(1, 16))
    model = vp.normalize(nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(8)]), data)
    for size in (SMALL, 2**40):
        with parts_of(size):
            events, own = Events(), copy.deepcopy(model)
            own.compile(backend=events.compile, fullgraph=True)
            wrapped = DDP(own, bucket_cap_mb=SMALL / 2**20)
            wrapped.register_comm_hook(None, events.send)
            for _ in range(3):
                events.clear()
                wrapped(torch.ones(2, 16)).square().mean().backward()
            found[size] = list(events)
    return found


def test_gradients_leave_between_compiled_graphs(found: Any) -> None:
    """torch cuts a compiled model where buckets are full; each graph has the fold of its own layers."""
    events = found["compiled_order_of_events"]
    assert events[SMALL].count("graph") > 2 and "bucket" in _before_last_graph(events[SMALL])
    assert "bucket" not in _before_last_graph(events[2**40])


def _before_last_graph(events: list[str]) -> list[str]:
    return events[: len(events) - events[::-1].index("graph")]


def counted(rank: int, work: Callable[[], Any]) -> Counter[str]:
    if rank:
        work()
        return Counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    names = (event.name for event in profile.events())
    return Counter(name for name in names if name.startswith("c10d::") and "barrier" not in name)


def collectives(rank: int) -> dict[str, dict[str, Counter[str]]]:
    """Of the second step of a model, the first being different; as the first process sees it, which is the one read."""
    found: dict[str, dict[str, Counter[str]]] = {}
    for name in ("DDP", "fully_shard", "fully_shard, blocks"):
        found[name] = {}
        for kind, make in (("plain", plain), ("normalized", normalized)):
            with parts_of(SMALL):
                model = ENGINES[name](make())
                model(batch(0)).square().mean().backward()
                found[name][kind] = counted(rank, lambda model=model: model(batch(0)).square().mean().backward())
    found["SyncBatchNorm"] = {"one layer": counted(rank, one_synchronized_batch_norm)}
    return found


def one_synchronized_batch_norm() -> None:
    """SyncBatchNorm's own code with stand-ins for its kernels, which exist on GPUs alone: its collectives are real."""
    x, ones = torch.randn(4, 3, 5, requires_grad=True), torch.ones(3, requires_grad=True)
    sums = torch.ones(3)
    stand_ins = {
        "batch_norm_stats": lambda x, eps: (sums, sums),
        "batch_norm_gather_stats_with_counts": lambda x, *_: (sums, sums),
        "batch_norm_elemt": lambda x, *_: x * 1,
        "batch_norm_backward_reduce": lambda grad, *_: (sums, sums, sums, sums),
        "batch_norm_backward_elemt": lambda grad, *_: grad * 1,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, function in stand_ins.items():
            patch.setattr(torch, name, function)
        SyncStatistics.apply(x, ones, ones, None, None, 1e-5, 0.1, dist.group.WORLD, WORLD).sum().backward()


def test_no_collective_is_added(found: Any) -> None:
    by_engine = dict(found["collectives"])
    (synchronized,) = by_engine.pop("SyncBatchNorm").values()
    assert sum(synchronized.values()) == 2  # one in the forward pass, one in the backward pass
    for counts in by_engine.values():
        assert counts["plain"] and counts["normalized"] == counts["plain"]


class Dense(nn.Module):
    """Layers that read each other through functions of single channels, and through a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(*size) for size in ((6, 8), (8, 6), (6, 8), (8, 4)))
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.b(torch.relu(self.a(x))))
        return self.d(nn.functional.gelu(self.c(self.norm(x))))


def dense() -> nn.Module:
    torch.manual_seed(0)
    data = vp.Moments(torch.zeros(1, 6).double(), torch.ones(1, 6).double())
    model = vp.normalize(Dense().double(), data, form="paper")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def dense_trained(model: nn.Module, inputs: int = 6) -> list[Tensor]:
    parameters = list(model.parameters())
    optimizer, x = torch.optim.SGD(parameters, 0.05), batch(0).flatten(1)[:, :inputs].to(parameters[0].dtype)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [full(p) for p in model.parameters()]


class InTurns(nn.Module):
    """A layer that is called before and after another one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(torch.relu(self.b(torch.relu(self.a(x)))))


def fsdp1(model: Any) -> nn.Module:
    return FSDP1(model, device_id=torch.device("cpu"), use_orig_params=True)


def other_engines(_rank: int) -> dict[str, Any]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.init_device_mesh("cpu", (WORLD,))
    x = torch.linspace(-1, 2, 24).view(4, 6).double()  # equal in all processes
    plan = {"a": ColwiseParallel(), "b": RowwiseParallel(), "c": ColwiseParallel(), "d": RowwiseParallel()}
    found: dict[str, Any] = {}
    for name, style in plan.items():  # the other layers are left as they are
        model = parallelize_module(dense(), mesh, {name: style})
        found[f"tensor parallel, {name}"] = message(functools.partial(model, x))
    found["tensor parallel"] = message(lambda: parallelize_module(dense(), mesh, plan)(x))
    compiled = torch.compile(parallelize_module(dense(), mesh, plan), backend="eager")
    found["tensor parallel, compiled"] = message(lambda: compiled(x))
    folded = vp.fold(dense())
    found["folded"] = folded(x), parallelize_module(folded, mesh, plan)(x)
    model = dense()
    for name in plan:
        fully_shard(getattr(model, name))
    found["layer by layer"] = dense_trained(fully_shard(model))
    model = dense()
    fully_shard(model.norm)
    found["norm"] = message(lambda: fully_shard(model)(x))
    found["alone"] = message(lambda: sharded_blocks(normalized()).dense[1](x))
    recalled = case("recalled").normalized()
    fully_shard(recalled.left)
    fully_shard(recalled.shared)
    found["called twice"] = dense_trained(fully_shard(recalled), 5)
    in_turns = vp.normalize(InTurns().double(), vp.Moments(torch.zeros(1, 6).double(), torch.ones(1, 6).double()))
    fully_shard(in_turns.a)
    fully_shard(in_turns.b)
    found["called on what comes later"] = message(lambda: fully_shard(in_turns)(x))
    whole, in_blocks = fsdp1(dense()), dense()
    dense_trained(whole)
    with FSDP1.summon_full_params(whole):
        found["FSDP1"] = [full(p) for p in whole.parameters()]
    in_blocks.b = fsdp1(in_blocks.b)
    found["FSDP1, blocks"] = message(lambda: fsdp1(in_blocks)(x))
    return found


def message(work: Callable[[], Any]) -> str:
    try:
        work()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.compatibility("tensor parallel")
def test_engines_and_what_is_refused(found: Any) -> None:
    found = found["other_engines"]
    alone = dense_trained(dense())
    for name in ("layer by layer", "FSDP1"):
        for ours, theirs in zip(found[name], alone, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*found["folded"], rtol=1e-12, atol=1e-12)
    assert "use torch.distributed.fsdp.fully_shard" in found["FSDP1, blocks"]
    for ours, theirs in zip(found["called twice"], dense_trained(case("recalled").normalized(), 5), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for name in ("norm", "alone", "called on what comes later"):
        assert "fully_shard on the whole model" in found[name]
    refused = {name: text for name, text in found.items() if name.startswith("tensor parallel")}
    assert len(refused) == 6
    for text in refused.values():
        assert "call parallelize_module on the plain model that vp.fold returns" in text
