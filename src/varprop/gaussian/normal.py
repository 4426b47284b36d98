"""The standard normal law: density, distribution, scaled partial moments, and the working precision."""

import functools
import math
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeAlias

import torch
from torch import Tensor

Scalar: TypeAlias = Tensor | float
Pair: TypeAlias = tuple[Tensor, Tensor]
# Mean and variance as two rows, and for every argument their derivatives as four: of the mean by mean and by variance,
# then of the variance.
Slopes: TypeAlias = tuple[Tensor, list[Tensor]]
P = ParamSpec("P")

ROOT_HALF = math.sqrt(0.5)
ROOT_TWO_PI = math.sqrt(2.0 * math.pi)
# Beyond 39 standard deviations the float64 density is zero; ratios are cut here so that none overflows.
FAR = 50.0
LEAST_STD = 1e-12  # below it the derivative of the standard deviation is held
BLOCK = 1 << 12  # elements whose temporaries stay in the cache of a processor
BATCH = {"cpu": 1 << 15, "other": 1 << 22}  # values held at a time: a cache full, or enough to fill a GPU


def working_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 on devices without it."""
    return torch.float32 if device.type == "mps" else torch.float64


def as_tensor(value: Scalar, like: Tensor) -> Tensor:
    """A number or a tensor in the dtype of `like`; a number becomes a 0-d tensor on its device."""
    if isinstance(value, Tensor):
        return value.to(like.dtype)
    return torch.full((), float(value), dtype=like.dtype, device=like.device)


def promote(*tensors: Tensor) -> tuple[torch.dtype, list[Tensor]]:
    """The common dtype of the arguments, and the arguments broadcast in the working dtype."""
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in tensors))
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    work = working_dtype(tensors[0].device)
    return dtype, list(torch.broadcast_tensors(*(x.to(work) for x in tensors)))


def in_float64(
    function: Callable[Concatenate[Tensor, Tensor, P], Pair],
) -> Callable[Concatenate[Tensor, Tensor, P], Pair]:
    """Decorates an elementwise `function(mean, std, ...)`: float64 inside, the given dtype outside.

    Large tensors are taken in blocks that fit the processor's cache, unless a parameter varies over them.
    """

    @functools.wraps(function)
    def wrapped(mean: Tensor, std: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> Pair:
        dtype, (mean, std) = promote(mean, std)
        varying = any(isinstance(p, Tensor) and p.numel() > 1 for p in (*args, *kwargs.values()))
        if varying or mean.numel() <= BLOCK or mean.device.type != "cpu" or torch.compiler.is_compiling():
            m, v = function(mean, std, *args, **kwargs)
        else:
            blocks = zip(mean.reshape(-1).split(BLOCK), std.reshape(-1).split(BLOCK), strict=True)
            pairs = [function(m, s, *args, **kwargs) for m, s in blocks]
            m, v = (torch.cat(results).reshape(mean.shape) for results in zip(*pairs, strict=True))
        return m.to(dtype), v.to(dtype)

    return wrapped


def batches(count: int, like: Tensor) -> list[Tensor]:
    """The indices 0 .. count - 1 in batches small enough to hold a copy of `like` for each index."""
    batch = BATCH["cpu" if like.device.type == "cpu" else "other"]
    indices = torch.arange(count, device=like.device)
    return list(indices.split(max(1, batch // max(1, like.numel()))))


def rowwise(function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
    """A function of rows (last axis), on a processor in blocks of rows whose temporaries stay in its cache.

    Its results keep the leading axes.
    """
    width, lead = inputs[0].shape[-1], inputs[0].shape[:-1]
    rows = max(1, 2 * BLOCK // max(1, width))
    like = inputs[0]
    if like.numel() <= rows * width or like.device.type != "cpu" or torch.compiler.is_compiling():
        return function(*inputs)
    blocks = zip(*(x.reshape(-1, width).split(rows) for x in inputs), strict=True)
    results = zip(*(function(*block) for block in blocks), strict=True)
    return tuple(torch.cat(result).reshape(*lead, *result[0].shape[1:]) for result in results)


def readable(x: Tensor) -> bool:
    """True if values may decide what is computed: they are at hand without waiting, and nothing is being traced."""
    recorded = torch.compiler.is_compiling() or torch._C._get_tracing_state() or torch._C._len_torch_dispatch_stack()
    transformed = torch._C._are_functorch_transforms_active()
    return x.is_cpu and type(x) in (Tensor, torch.nn.Parameter) and not recorded and not transformed


def pdf(x: Tensor) -> Tensor:
    """phi(x) = exp(-x^2/2) / sqrt(2 pi)."""
    return torch.exp(-0.5 * x * x) / ROOT_TWO_PI


def cdf(x: Tensor) -> Tensor:
    """Phi(x), to full relative accuracy in the lower tail."""
    return 0.5 * torch.erfc(-ROOT_HALF * x)


def ratio(mean: Tensor, std: Tensor) -> Tensor:
    """mean/std cut to [-50, 50]; at std = 0 it is +-50, or 0 if the mean is 0 as well."""
    # Raising the divisor rather than cutting the quotient keeps 1/std out of the derivatives too.
    return mean / torch.maximum(std, mean.detach().abs() / FAR).clamp(min=torch.finfo(std.dtype).tiny ** 0.5)


def mills(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """H_n(x) = E[(Z - x)_+^n] / phi(x) for n = 0, 1, 2 and 0 <= x <= 50; H_0 is Mills' ratio.

    Below 4 from erfcx with H_{n+1} = n H_{n-1} - x H_n; above, where that cancels, from the downward
    recursion r_n = n / (x + r_{n+1}) of the ratios r_n = H_n / H_{n-1}, all terms of which are positive.
    Relative error 4e-14 (mathematics.md, section 2).
    """
    all_near = readable(x) and bool((x < 4.0).all())
    low = x if all_near else x.clamp(max=4.0)
    h0 = math.sqrt(0.5 * math.pi) * torch.special.erfcx(ROOT_HALF * low)
    h1, h2 = 1.0 - low * h0, (1.0 + low * low) * h0 - low
    if all_near:
        return h0, h1, h2
    high = x.clamp(min=4.0)
    # 24 steps: the start's error shrinks by about exp(-2 x sqrt(24)), below rounding from x = 4 on. Each step is one
    # operation on y = x + r.
    unit, y = torch.ones_like(high), 0.5 * (torch.sqrt(high * high + 100.0) + high)
    for n in range(24, 2, -1):
        y = torch.addcdiv(high, unit, y, value=n)
    r = 2.0 / y
    c = 1.0 / (high + r)
    h = 1.0 / (high + c)
    near = x < 4.0
    return torch.where(near, h0, h), torch.where(near, h1, c * h), torch.where(near, h2, r * c * h)


class _SafeSqrt(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.sqrt(x.clamp(min=0.0))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        floor = max(LEAST_STD, torch.finfo(root.dtype).tiny)
        slope: Tensor = grad / (2.0 * root.clamp(min=floor))
        return slope


class _SafeSqrtForward(_SafeSqrt):
    jvp = _SafeSqrt.backward  # of one variable: the tangent is multiplied by the same slope


def safe_sqrt(var: Tensor) -> Tensor:
    """sqrt(max(var, 0)) whose derivative 1 / (2 max(sqrt var, 1e-12)) stays finite at zero."""
    if not torch.is_grad_enabled():
        return _SafeSqrt.forward(var)
    if not var.requires_grad:  # in operations that have derivatives of every order, forward ones too
        root = _SafeSqrt.forward(var).detach()
        floor = max(LEAST_STD, torch.finfo(root.dtype).tiny)
        held = root < floor
        return torch.where(held, root + (var - var.detach()) / (2.0 * floor), torch.where(held, 1.0, var).sqrt())
    result: Tensor = applied(_SafeSqrt, _SafeSqrtForward, var)
    return result


def differentiated(*tensors: Tensor) -> bool:
    """True if a gradient by one of the tensors may be asked for."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def applied(function: Any, with_jvp: Any, *inputs: Any) -> Any:
    """An autograd function; the one with a forward-mode derivative unless compiled, which torch does not do.

    Its forward alone if no gradient may be asked for: an autograd function has an overhead of 50 us.
    """
    if not differentiated(*inputs):
        return function.forward(*inputs)
    return (function if torch.compiler.is_compiling() else with_jvp).apply(*inputs)


def gauss_legendre(n: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Nodes and weights on [-1, 1] to double precision, by Newton's method on the Legendre recursion."""
    nodes, weights = [], []
    for i in range(n):
        x, slope = math.cos(math.pi * (i + 0.75) / (n + 0.5)), 1.0
        for _ in range(8):
            p, q = x, 1.0
            for k in range(2, n + 1):
                p, q = ((2 * k - 1) * x * p - (k - 1) * q) / k, p
            slope = n * (x * p - q) / (x * x - 1.0)
            x -= p / slope
        nodes.append(x)
        weights.append(2.0 / ((1.0 - x * x) * slope * slope))
    return tuple(nodes), tuple(weights)


@functools.cache
def unit_legendre(n: int) -> tuple[tuple[float, float], ...]:
    """Pairs of a node and its weight on [0, 1]."""
    return tuple(((1.0 + x) / 2.0, w / 2.0) for x, w in zip(*gauss_legendre(n), strict=True))


@functools.lru_cache(maxsize=64)
def _cached_constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


def constant(values: tuple[float, ...], like: Tensor) -> Tensor:
    """A 1-d tensor of constants, cached per CUDA device: a CUDA graph cannot copy them from the host."""
    plain = not torch.compiler.is_compiling() and type(like) in (Tensor, torch.nn.Parameter)
    if plain and like.is_cuda:
        return _cached_constant(values, like.dtype, like.device)
    return torch.tensor(values, dtype=like.dtype, device=like.device)
