"""SAC and CrossQ with batch norm, layer norm, no norm and the analytic normalization, on continuous control.

    python -m benchmarks.actor_critic run RECORDS [--environments ...] [--methods ...] [--max-seconds 540]
    python -m benchmarks.actor_critic pool RECORDS --processes 12 --environments HalfCheetah-v5    # many CPU cores
    python -m benchmarks.actor_critic gather FILE RECORDS ...                                       # a line a cell
    python -m benchmarks.actor_critic show RECORDS    # the table, and RECORDS.svg and .png if matplotlib is there
    python -m benchmarks.actor_critic cost FILE       # CPU time of one agent's step by method, as JSON

CrossQ (Bhatt et al. 2024) is SAC without target networks: batch norm in the networks makes up for them, if the critics
see the present and the next states and actions in one joint batch. Here the normalization stands in the place of batch
norm; its statistics follow from the weights and from the moments of the inputs, so that there is no joint batch. Those
moments are each agent's own: `vp.input_moments` of the observations and actions of its first steps, which are random
and fill the replay buffer anyway. They are not changed afterwards.

A cell is a method in an environment. All its agents (every rate with every seed) are trained side by side: as networks
with as many groups of channels as there are agents. Groups do not mix, so each agent learns as it would alone. The
first seeds choose the rate, the others are reported. RECORDS is a file of JSON lines, one for every cell; cells that it
has are not run again. A cell that is stopped by the time limit is recorded as far as it came.

`pool` trains agents alone, one in each process: all rates with the first seeds, then the rate that they choose with the
others. Every agent is recorded as it goes, so that one that is stopped at any time has its returns so far.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import itertools
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import varprop as vp
from varprop.text_table import Table
from varprop_lab.environment import git_state, versions
from varprop_lab.figures import LOOK
from varprop_lab.training import captured

from .deep.side_by_side import by_products


@dataclass(frozen=True)
class Method:
    """What stands in the networks, and how they are trained."""

    norm: str
    targets: bool = False
    beta1: float = 0.5  # of Adam, as CrossQ has it
    delay: int = 3  # steps of the critics for one of the actor


METHODS = {
    "analytic": Method("analytic"),
    "batch norm": Method("batch"),
    "none": Method("none"),
    "layer norm": Method("layer"),
    "SAC": Method("none", targets=True, beta1=0.9, delay=1),
}
ENVIRONMENTS = {  # steps in all, random ones first
    "Pendulum-v1": (10_000, 1000),
    "InvertedDoublePendulum-v5": (12_000, 1000),
    "HalfCheetah-v5": (25_000, 2000),
    "Hopper-v5": (50_000, 5000),
    "MountainCarContinuous-v0": (20_000, 1000),
}
RATES = (3e-4, 1e-3, 3e-3)
SEARCH_SEEDS, SEEDS = (100, 101, 102), (0, 1, 2, 3, 4)
DISCOUNT, TAU = 0.99, 0.005
INTERVALS = 20  # of a training, in which returns are averaged
STYLES = {  # colours and lines of the figure
    "analytic": ("#d55e00", "-"),
    "batch norm": ("#0064a8", "-"),
    "none": ("#4a4d50", ":"),
    "layer norm": ("#9c00fc", "--"),
    "SAC": ("#009e73", "-."),
}
LAST = 5  # intervals that count for the table: the last quarter
TOLD_EVERY = 60.0  # seconds, how far an agent of the pool is


# ------------------------------------------------------------------------------------------------------- networks


def network(norm: str, sizes: Sequence[int], groups: int, inputs: Tensor) -> nn.Module:
    """Return `groups` perceptrons as one network of (N, groups * channels, 1, 1).

    Args:
        norm: In front of the rectifiers, or behind them and at the input for batch norm, as in CrossQ.
        sizes: Channels of the input, the hidden layers and the output of each perceptron.
        groups: How many there are.
        inputs: Inputs of the random steps, whose moments the analytic normalization uses.
    """
    layers: list[nn.Module] = [batch_norm(groups * sizes[0])] if norm == "batch" else []
    hidden = []
    for before, after in itertools.pairwise(sizes[:-1]):
        hidden.append(str(len(layers)))
        layers.append(nn.Conv2d(groups * before, groups * after, 1, groups=groups))
        if norm == "layer":
            layers.append(nn.GroupNorm(groups, groups * after))
        layers.append(nn.ReLU())
        if norm == "batch":
            layers.append(batch_norm(groups * after))
    layers.append(nn.Conv2d(groups * sizes[-2], groups * sizes[-1], 1, groups=groups))
    model = nn.Sequential(*layers)
    return vp.normalize(model, vp.input_moments(inputs), only=hidden) if norm == "analytic" else model


def batch_norm(channels: int) -> nn.Module:
    """CrossQ's batch renorm is this for its first 100,000 steps."""
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


def called(model: nn.Module, x: Tensor, groups: int, training: bool = False) -> Tensor:
    """Outputs (N, groups, outputs) for inputs (N, groups, channels); batch norm uses its batch in training alone."""
    model.train(training)
    outputs: Tensor = model(x.flatten(1)[:, :, None, None])
    return outputs.flatten(1).unflatten(1, (groups, -1))


class Products(TorchFunctionMode):
    """Computes all convolutions, which are of one position, by batched matrix products."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take over convolutions."""
        if func is torch.conv2d and not kwargs and len(args) == 7:
            return by_products(*args[:3], args[3][0], args[4][0], args[6])
        return func(*args, **(kwargs or {}))


class Adam:
    """Adam with a rate for every agent: the rows of a parameter belong to agents, in order."""

    def __init__(self, parameters: Iterable[Tensor], rates: Tensor, beta1: float) -> None:
        self.parameters, self.beta1 = list(parameters), beta1
        self.rates = [
            rates.repeat_interleave(len(p) // len(rates)).view(-1, *[1] * (p.ndim - 1)) for p in self.parameters
        ]
        self.means, self.squares = ([torch.zeros_like(p) for p in self.parameters] for _ in range(2))
        self.step_count = torch.zeros((), device=rates.device)

    @torch.no_grad()
    def step(self, loss: Tensor, beta2: float = 0.999, eps: float = 1e-8) -> None:
        """Move the parameters against the gradient of the loss."""
        grads = torch.autograd.grad(loss, self.parameters)
        self.step_count += 1
        torch._foreach_lerp_(self.means, grads, 1 - self.beta1)
        torch._foreach_mul_(self.squares, beta2)
        torch._foreach_addcmul_(self.squares, grads, grads, 1 - beta2)
        roots = torch._foreach_sqrt(self.squares)
        torch._foreach_div_(roots, (1 - beta2**self.step_count).sqrt())
        torch._foreach_add_(roots, eps)
        moves = torch._foreach_div(self.means, roots)
        torch._foreach_div_(moves, 1 - self.beta1**self.step_count)
        torch._foreach_mul_(moves, self.rates)
        torch._foreach_sub_(self.parameters, moves)


# --------------------------------------------------------------------------------------------------------- agents


class Agents:
    """Soft actor-critics side by side, and what they have seen.

    Args:
        method: The normalization and the rest of the method.
        rates: Of each agent.
        replay: What happened in every step, (steps, agents, sum of `sizes`).
        sizes: Of its parts: state, action, next state, reward, end.
        seen: Steps in `replay` so far, all random: their moments are those of the inputs.
        width: Of hidden layers.
        batch: Samples of a step.
    """

    def __init__(
        self,
        method: Method,
        rates: Tensor,
        replay: Tensor,
        sizes: Sequence[int],
        seen: int,
        width: int = 256,
        batch: int = 256,
    ) -> None:
        self.method, self.replay, self.sizes, self.batch, self.count = method, replay, sizes, batch, len(rates)
        device = rates.device
        self.seen = torch.tensor(seen, device=device)
        states, actions = replay[:seen].cpu().split(list(sizes), 2)[:2]
        self.actions = actions.shape[2]
        pairs = torch.cat([states, actions], 2)
        hidden = (width, width)
        self.actor = network(
            method.norm,
            (states.shape[2], *hidden, 2 * self.actions),
            self.count,
            states.flatten(1)[:, :, None, None],
        ).to(device)
        self.critics = network(
            method.norm, (pairs.shape[2], *hidden, 1), 2 * self.count, pairs.flatten(1).repeat(1, 2)[:, :, None, None]
        ).to(device)
        self.targets = copy.deepcopy(self.critics) if method.targets else self.critics
        self.log_alpha = torch.zeros(self.count, device=device, requires_grad=True)
        self.actor_adam = Adam(self.actor.parameters(), rates, method.beta1)
        self.critic_adam = Adam(self.critics.parameters(), rates.repeat(2), method.beta1)
        self.alpha_adam = Adam([self.log_alpha], rates, method.beta1)

    def act(self, states: Tensor, training: bool = False) -> tuple[Tensor, Tensor]:
        """Return drawn actions (N, agents, size) and the logarithm of their density (N, agents)."""
        mean, log_std = called(self.actor, states, self.count, training).chunk(2, 2)
        log_std = -5 + 0.5 * (2 + 5) * (torch.tanh(log_std) + 1)  # between -5 and 2
        noise = torch.randn_like(mean)
        before = mean + log_std.exp() * noise
        density = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        density = density - 2 * (math.log(2) - before - F.softplus(-2 * before))  # of tanh
        return torch.tanh(before), density.sum(2)

    def values(self, model: nn.Module, states: Tensor, actions: Tensor, training: bool = False) -> Tensor:
        """Return the values of both critics, (N, 2, agents)."""
        pairs = torch.cat([states, actions], 2).repeat(1, 2, 1)
        return called(model, pairs, 2 * self.count, training).view(-1, 2, self.count)

    def update(self, with_actor: bool) -> None:
        """Take a step of the critics on drawn samples, and one of the actor if asked."""
        drawn = (torch.rand(self.batch, self.count, device=self.seen.device) * self.seen).long()
        sample = self.replay[torch.minimum(drawn, self.seen - 1), torch.arange(self.count, device=drawn.device)]
        state, action, after, reward, end = sample.split(list(self.sizes), 2)
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad():
            next_action, density = self.act(after)
        if self.method.norm == "batch":  # one joint batch, whose statistics normalize both halves
            both = self.values(self.critics, torch.cat([state, after]), torch.cat([action, next_action]), training=True)
            now, later = both[: self.batch], both[self.batch :].detach()
        else:
            now = self.values(self.critics, state, action)
            with torch.no_grad():
                later = self.values(self.targets, after, next_action)
        with torch.no_grad():
            soft = later.amin(1) - alpha * density
            wanted = reward[..., 0] + DISCOUNT * (1 - end[..., 0]) * soft
        self.critic_adam.step((now - wanted[:, None]).square().mean(0).sum())
        if self.method.targets:
            with torch.no_grad():
                torch._foreach_lerp_(list(self.targets.parameters()), list(self.critics.parameters()), TAU)
        if with_actor:
            chosen, density = self.act(state, training=True)
            value = self.values(self.critics, state, chosen).amin(1)
            self.actor_adam.step((alpha * density - value).mean(0).sum())
            surplus = density.detach().mean(0) - self.actions  # over the entropy aimed at, one nat for each action
            self.alpha_adam.step(-(self.log_alpha * surplus).sum())


# ------------------------------------------------------------------------------------------------------- training


@dataclass
class Environments:
    """One environment for each agent; episodes begin anew where they end."""

    name: str
    seeds: Sequence[int]
    returns: list[list[tuple[int, float]]] = field(init=False)  # of each agent: at which step, and how much

    def __post_init__(self) -> None:
        import gymnasium

        self.envs = [gymnasium.make(self.name, disable_env_checker=True) for _ in self.seeds]
        self.state = torch.stack(
            [self._tensor(env.reset(seed=seed)[0]) for env, seed in zip(self.envs, self.seeds, strict=True)]
        )
        space: Any = self.envs[0].action_space
        low, high = torch.from_numpy(space.low), torch.from_numpy(space.high)
        self.middle, self.half = (high + low) / 2, (high - low) / 2
        self.totals, self.returns = [0.0] * len(self.envs), [[] for _ in self.envs]

    @staticmethod
    def _tensor(values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.float32)

    def step(self, actions: Tensor, number: int) -> list[Tensor]:
        """Take actions between -1 and 1; return state, action, next state, reward and end, (agents, size) each."""
        chosen = (self.middle + self.half * actions).numpy()
        before, after, rewards, ends, following = self.state, [], [], [], []
        for place, env in enumerate(self.envs):
            state, reward, terminated, truncated, _ = env.step(chosen[place])
            after.append(self._tensor(state))
            rewards.append(float(reward))
            ends.append(float(terminated))  # an episode that is merely cut off goes on in the values
            self.totals[place] += float(reward)
            if terminated or truncated:
                self.returns[place].append((number, self.totals[place]))
                self.totals[place], state = 0.0, env.reset()[0]
            following.append(self._tensor(state))
        self.state = torch.stack(following)
        return [before, actions, torch.stack(after), torch.tensor(rewards)[:, None], torch.tensor(ends)[:, None]]


def trained(
    name: str,
    method: Method,
    agents: Sequence[tuple[float, int]],
    options: argparse.Namespace,
    until: float,
    told: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Train agents, given by rate and seed, in an environment; return the returns of their episodes by interval.

    What would be returned is `told` once in a while.
    """
    steps, random_steps = ENVIRONMENTS[name]
    steps, random_steps = options.steps or steps, options.random_steps or random_steps
    device, start = torch.device(options.device), time.time()
    last = start
    seeds = [seed for _, seed in agents]
    environments = Environments(name, seeds)
    torch.manual_seed(seeds[0])
    size, actions_size = environments.state.shape[1], len(environments.half)
    sizes = size, actions_size, size, 1, 1
    replay = torch.zeros(steps, len(agents), sum(sizes), device=device)
    learner: Agents | None = None
    done = 0
    for number in range(steps):
        if number < random_steps:
            actions = 2 * torch.rand(len(agents), actions_size) - 1
        else:
            if learner is None:
                rates = torch.tensor([rate for rate, _ in agents], device=device)
                learner = Agents(method, rates, replay, sizes, number, options.width, options.batch)
                act, updates = programs(learner, environments.state.to(device))
            actions = act(environments.state)
            updates[number % method.delay]()  # a GPU works on it while the environments take their step
        replay[number].copy_(torch.cat(environments.step(actions, number), 1))
        done = number + 1
        if learner is not None:
            learner.seen.fill_(done)
        if number % 50 == 0:
            now = time.time()
            if now > until:
                break
            if now > last + TOLD_EVERY:
                last = now
                told(course(environments, agents, steps, done, random_steps, now - start))
    return course(environments, agents, steps, done, random_steps, time.time() - start)


def course(
    environments: Environments,
    agents: Sequence[tuple[float, int]],
    steps: int,
    done: int,
    random_steps: int,
    seconds: float,
) -> dict[str, Any]:
    """Return the returns of agents by interval, as far as they are."""
    curves = []
    for episodes in environments.returns:
        by_interval: list[list[float]] = [[] for _ in range(INTERVALS)]
        for number, total in episodes:
            by_interval[int(number // (steps / INTERVALS))].append(total)
        curves.append([round(statistics.fmean(totals), 2) if totals else None for totals in by_interval])
    return {
        "steps": steps,
        "done": done,
        "random": random_steps,
        "seconds": round(seconds, 1),
        "runs": [
            {"rate": rate, "seed": seed, "returns": curve} for (rate, seed), curve in zip(agents, curves, strict=True)
        ],
    }


def programs(learner: Agents, example: Tensor) -> tuple[Callable[[Tensor], Tensor], list[Callable[[], Any]]]:
    """Return how to act, and the updates in turn, the first of which moves the actor too; CUDA graphs on a GPU."""

    @torch.no_grad()
    def act() -> Tensor:
        with Products():
            return learner.act(example[None])[0][0]

    def update(with_actor: bool) -> None:
        with Products():
            learner.update(with_actor)

    replays: list[Callable[[], Any]] = [act, lambda: update(True), lambda: update(False)]
    if example.device.type == "cuda":
        changed = [*learner.actor.parameters(), *learner.critics.parameters(), *learner.targets.parameters()]
        changed += [learner.log_alpha, *learner.actor.buffers(), *learner.critics.buffers()]
        for adam in (learner.actor_adam, learner.critic_adam, learner.alpha_adam):
            changed += [*adam.means, *adam.squares, adam.step_count]
        values = [tensor.detach().clone() for tensor in changed]
        replays = [captured(program) for program in replays]
        with torch.no_grad():  # what was run to record it does not count
            for tensor, value in zip(changed, values, strict=True):
                tensor.copy_(value)

    def act_on(states: Tensor) -> Tensor:
        example.copy_(states)
        return torch.nan_to_num(replays[0]().cpu())  # of an agent that has diverged

    delay = learner.method.delay
    return act_on, [replays[1], *[replays[2]] * (delay - 1)]


# -------------------------------------------------------------------------------------------------------- records


def read(*paths: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return a record of every environment and method, with the longest run of every rate and seed.

    Runs that were stopped before half of their steps are left out; `done` is how far all others came.
    """
    lines: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for path in paths:
        for line in path.read_text().splitlines() if path.exists() else []:
            record = json.loads(line)
            lines.setdefault((record["environment"], record["method"]), []).append(record)
    records = {}
    for key, found in lines.items():
        longest: dict[tuple[float, int], dict[str, Any]] = {}
        for record in found:
            for run in record["runs"]:
                at, done = (run["rate"], run["seed"]), run.get("done", record["done"])
                if 2 * done >= record["steps"] and done >= longest.get(at, {"done": 0})["done"]:
                    longest[at] = {**run, "done": done}
        if longest:
            runs = [run for _, run in sorted(longest.items())]
            records[key] = {**found[-1], "done": min(run["done"] for run in runs), "runs": runs}
    return records


def append(options: argparse.Namespace, environment: str, method: str, found: dict[str, Any]) -> None:
    """Append what was found to the records."""
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    about = {"hardware": where, "git": git_state(), "torch": versions()["torch"]}
    settings = {"width": options.width, "batch": options.batch}
    line = json.dumps({"environment": environment, "method": method, **settings, **about, **found})
    with options.records.open("a") as file:  # one write: several processes append to this file
        file.write(line + "\n")


def run(options: argparse.Namespace) -> None:
    """Run the cells that are missing, one after the other, until time is up."""
    torch.set_num_threads(1)
    until = time.time() + options.max_seconds
    agents = [(rate, seed) for rate in options.rates for seed in (*SEARCH_SEEDS[: options.search], *options.seeds)]
    for environment in options.environments:
        for method in options.methods:
            record = read(options.records).get((environment, method))
            if (record and record["done"] == record["steps"]) or time.time() > until:
                continue
            found = trained(environment, METHODS[method], agents, options, until)
            append(options, environment, method, found)
            print(f"{environment}, {method}: {found['done']} steps in {found['seconds']} s", flush=True)


# ----------------------------------------------------------------------------------------------------- processes


Job = tuple[str, str, float, int]  # environment, method, rate, seed


def alone(job: Job, options: argparse.Namespace, until: float) -> tuple[Job, list[float | None]]:
    """Train an agent in this process, record it as it goes, and return its returns."""
    torch.set_num_threads(1)
    environment, method, *agent = job
    found = trained(
        environment, METHODS[method], [tuple(agent)], options, until, lambda found: append(options, *job[:2], found)
    )
    append(options, environment, method, found)
    print(f"{job}: {found['done']} steps in {found['seconds']} s", flush=True)
    return job, found["runs"][0]["returns"]


def wanted(options: argparse.Namespace, scores: dict[Job, float]) -> Iterator[Job]:
    """Yield the jobs that may begin, the most important first: a method's other seeds wait for what its first ones say.

    An environment's methods come in turn, so that all get as far.
    """
    for environment in options.environments:
        searches, tests = [], []
        for method in options.methods:
            tried = {
                rate: [(environment, method, rate, seed) for seed in SEARCH_SEEDS[: options.search]]
                for rate in options.rates
            }
            searches.append([job for jobs in tried.values() for job in jobs])
            if all(job in scores for job in searches[-1]):
                best = max(tried, key=lambda rate: statistics.fmean(scores[job] for job in tried[rate]))
                tests.append([(environment, method, best, seed) for seed in options.seeds])
        for jobs in (itertools.chain(*zip(*tests, strict=True)), *searches):
            yield from jobs


def pool(options: argparse.Namespace) -> None:
    """Train agents in processes of their own until all are trained or time is up."""
    until = time.time() + options.max_seconds
    scores = {
        (*cell, run["rate"], run["seed"]): score(filled(run["returns"]))
        for cell, record in read(options.records).items()
        for run in record["runs"]
        if run["done"] == record["steps"]
    }
    begun = set(scores)
    running: set[Future[tuple[Job, list[float | None]]]] = set()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=context) as executor:
        while time.time() < until:
            for job in wanted(options, scores):
                if len(running) == options.processes:
                    break
                if job not in begun:
                    begun.add(job)
                    running.add(executor.submit(alone, job, options, until))
            if not running:
                break
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                job, returns = future.result()
                scores[job] = score(filled(returns))


def cost(options: argparse.Namespace, rounds: int = 20) -> dict[str, dict[str, float]]:
    """Return the CPU time of a step of one agent as a multiple of that without normalization and targets.

    Observations and actions have the sizes of HalfCheetah's. Methods take turns, so that all meet the same load.
    """
    torch.set_num_threads(1)
    sizes = 17, 6, 17, 1, 1
    replay, state = torch.randn(1000, 1, sum(sizes)), torch.randn(1, 17)
    replay[..., -1] = 0
    times: dict[tuple[str, str], list[float]] = {}

    def timed(name: str, method: str, work: Callable[[], Any]) -> None:
        start = time.process_time()
        work()
        times.setdefault((name, method), []).append(time.process_time() - start)

    learners = {}
    for method, chosen in METHODS.items():
        learner = Agents(
            replace(chosen, delay=3), torch.tensor([1e-3]), replay, sizes, 1000, options.width, options.batch
        )
        learners[method] = learner, *programs(learner, state.clone())
    for _ in range(rounds):
        for method, (learner, act, updates) in learners.items():
            timed("update", method, lambda updates=updates: [update() for update in updates])
            timed("act", method, lambda act=act: act(state))
            if METHODS[method].norm == "analytic":
                with vp.unchanged(learner.actor):
                    act(state)
                    timed("act, unchanged", method, lambda act=act: act(state))
    plain = {name: statistics.median(times[name, "none"]) for name in ("update", "act")}
    found: dict[str, dict[str, float]] = {}
    for (name, method), values in times.items():
        of_none = statistics.median(values) / plain[name.partition(",")[0]]
        found.setdefault(method, {})[name] = round(of_none, 2)
    return found


def filled(returns: Sequence[float | None]) -> list[float]:
    """Return a value for every interval: where no episode ended, that of the interval before (or the first one)."""
    first = next((value for value in returns if value is not None), math.nan)
    return list(itertools.accumulate(returns, lambda before, value: before if value is None else value, initial=first))[
        1:
    ]


def curves(records: dict[tuple[str, str], dict[str, Any]], environment: str) -> dict[str, dict[str, Any]]:
    """Return for every method the rate that its first seeds choose, and the returns of the other seeds by interval.

    Methods whose search goes on are left out, and only intervals that all have reached count. With them come the
    returns at every rate: of the other seeds, or of the first ones where the others have one rate alone.
    """
    cells = {
        method: records[environment, method]
        for method in METHODS
        if (environment, method) in records
        and any(run["seed"] not in SEARCH_SEEDS for run in records[environment, method]["runs"])
    }
    reached = min((INTERVALS * cell["done"] // cell["steps"] for cell in cells.values()), default=0)
    found = {}
    for method, cell in cells.items():
        by_rate: dict[float, dict[int, list[float]]] = {}
        for run in cell["runs"]:
            by_rate.setdefault(run["rate"], {})[run["seed"]] = filled(run["returns"][:reached])

        def searched(rate: float, by_rate: dict[float, dict[int, list[float]]] = by_rate) -> float:
            return statistics.fmean(score(curve) for seed, curve in by_rate[rate].items() if seed in SEARCH_SEEDS)

        rate = max(by_rate, key=searched)
        tested = {seed: curve for seed, curve in by_rate[rate].items() if seed not in SEARCH_SEEDS}
        shared = set.intersection(*(set(seeds) for seeds in by_rate.values()))
        shown = shared - set(SEARCH_SEEDS) or shared
        found[method] = {
            "rate": rate,
            "steps": cell["steps"] * reached // INTERVALS,
            "curves": list(tested.values()),
            "by rate": {rate: [seeds[seed] for seed in sorted(shown)] for rate, seeds in sorted(by_rate.items())},
        }
    return found


def score(curve: Sequence[float]) -> float:
    """Return the mean of the last intervals."""
    return statistics.fmean(curve[-LAST:])


def shown(records: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Return the table: the chosen rate, the returns with it, and those of the last quarter at every rate."""
    lines = []
    for environment in ENVIRONMENTS:
        for method, found in curves(records, environment).items():
            scores = [score(curve) for curve in found["curves"]]
            edge = " (at the edge)" if found["rate"] in (min(found["by rate"]), max(found["by rate"])) else ""
            returns = f"{statistics.fmean(scores):,.0f} ({min(scores):,.0f} to {max(scores):,.0f})"
            throughout = statistics.fmean(statistics.fmean(curve) for curve in found["curves"])
            at_rates = {
                rate: statistics.fmean(score(curve) for curve in tested) for rate, tested in found["by rate"].items()
            }
            rates = ", ".join(f"{rate:g}: {value:,.0f}" for rate, value in at_rates.items())
            about = [environment, f"{found['steps']:,}", method, f"{found['rate']:g}{edge}", str(len(scores))]
            lines.append([*about, returns, f"{throughout:,.0f}", rates])
    last, by_rate = "last quarter, mean (lowest to highest seed)", "last quarter at every rate"
    columns = ["environment", "steps", "method", "rate", "seeds", last, "all steps", by_rate]
    return Table("", columns, lines, left=("environment", "method")).markdown()


def shown_search(records: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Return the table of the seeds that choose the rate, of agents that were trained to the end."""
    lines = []
    for environment, method in itertools.product(ENVIRONMENTS, METHODS):
        cell = records.get((environment, method), {"steps": 0, "runs": []})
        ended = [run for run in cell["runs"] if run["done"] == cell["steps"] and run["seed"] in SEARCH_SEEDS]
        for rate in sorted({run["rate"] for run in ended}):
            curves = [filled(run["returns"]) for run in ended if run["rate"] == rate]
            scores = " / ".join(f"{score(curve):,.0f}" for curve in curves)
            throughout = " / ".join(f"{statistics.fmean(curve):,.0f}" for curve in curves)
            lines.append([environment, f"{cell['steps']:,}", method, f"{rate:g}", scores, throughout])
    columns = ["environment", "steps", "method", "rate", "last quarter, by seed", "all steps, by seed"]
    return Table("", columns, lines, left=("environment", "method")).markdown()


def draw(records: dict[tuple[str, str], dict[str, Any]], stem: Path) -> None:
    """Draw the returns over steps, a panel for every environment; bands run from the lowest to the highest seed."""
    import matplotlib
    from matplotlib.figure import Figure

    names = [name for name in ENVIRONMENTS if curves(records, name)]
    with matplotlib.rc_context(LOOK):
        canvas = Figure(figsize=(max(6.6, 3.3 * len(names)), 3.1), layout="constrained")
        axes = canvas.subplots(1, len(names), squeeze=False)[0]
        for name, axis in zip(names, axes, strict=True):
            for method, found in curves(records, name).items():
                columns = list(zip(*found["curves"], strict=True))
                steps = [found["steps"] * (n + 1) / len(columns) / 1000 for n in range(len(columns))]
                axis.plot(steps, [statistics.fmean(column) for column in columns], STYLES[method][1], label=method)
                axis.lines[-1].set_color(STYLES[method][0])
                low, high = zip(*((min(column), max(column)) for column in columns), strict=True)
                axis.fill_between(steps, low, high, color=STYLES[method][0], alpha=0.12, linewidth=0)
            axis.set(title=name, xlabel="thousand steps")
        axes[0].set_ylabel("return of an episode")
        canvas.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(METHODS))
        for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
            canvas.savefig(stem.with_suffix(f".{kind}"), metadata=metadata)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "pool", "gather", "show", "cost"])
    parser.add_argument("records", type=Path)
    parser.add_argument("parts", nargs="*", type=Path, help="of records that are gathered")
    parser.add_argument("--environments", nargs="+", choices=ENVIRONMENTS, default=list(ENVIRONMENTS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rates", nargs="+", type=float, default=RATES)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--search", type=int, default=len(SEARCH_SEEDS), help="seeds that choose the rate")
    parser.add_argument("--steps", type=int, help="of each environment, instead of its own number")
    parser.add_argument("--random-steps", type=int)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-seconds", type=float, default=540.0)
    parser.add_argument("--searches", action="store_true", help="show what the seeds that choose the rate have found")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count(), help="of a pool")
    options = parser.parse_args()
    if options.command == "run":
        run(options)
    elif options.command == "pool":
        pool(options)
    elif options.command == "gather":
        lines = [json.dumps(record) + "\n" for record in read(options.records, *options.parts).values()]
        options.records.write_text("".join(lines))
    elif options.command == "cost":
        about = {"width": options.width, "batch": options.batch, "git": git_state(), "torch": versions()["torch"]}
        options.records.write_text(json.dumps({**about, "of none": cost(options)}, indent=1) + "\n")
    else:
        records = read(options.records)
        print(shown_search(records) if options.searches else shown(records))
        if not options.searches and importlib.util.find_spec("matplotlib"):
            draw(records, options.records)
