"""A network's prediction with its uncertainty: mean, covariance, intervals, probabilities, sources of the variance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..gaussian.normal import safe_sqrt
from ..text_table import text_table

POINTS = 512  # quasi-random points of an expected softmax: errors below 0.002


@dataclass(frozen=True, eq=False)
class SourceShare:
    """How much of the variance enters at one operation, input or parameter.

    Attributes:
        name: Path of the module, or the name of the input or parameter.
        kind: ``input``, ``parameter``, ``dropout``, ``draw``, ``product`` of two random values, ``shared product``
            if positions share one of them, or the non-linear operation whose curvature adds it.
        variance: The variance it adds to every output, (batch, outputs).
    """

    name: str
    kind: str
    variance: Tensor


@dataclass(frozen=True, eq=False)
class Prediction:
    """Mean and covariance of chosen outputs of a network for every sample of a batch, to first order in the noise.

    Attributes:
        mean: Expected outputs, (batch, outputs).
        covariance: Of the outputs of every sample, (batch, outputs, outputs).
        shares: The variance by source, in the order of execution.
        input_variance: The variance that every element of the input adds to every output,
            ``(batch, outputs, *input)``, if the input is random.
        reliable: For every sample, whether the first-order picture holds, by limits on what the prediction has: the
            variance beside the spread of the mean over the outputs (if there are several), what the curvature of
            activations adds, both stricter where independent units explain little of the variance, what products of
            noises that positions share add, maxima over what drops out, and a curved function at the end. A hint and
            no bound.
        diagonal_var: The outputs' variance by the rules alone, for which units are independent, (batch, outputs).
        linearized: Operations that were taken as linear around their mean, by module.
        draws: Real draws of the outputs, (draws, batch, outputs), if any were asked for; mean and covariance then
            rest on both. Where only the input is noisy each is correlated with the next.

    Example:
        >>> import torch, varprop as vp
        >>> nn = torch.nn
        >>> model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1))
        >>> prediction = vp.predict(model, torch.randn(8, 4))
        >>> low, high = prediction.interval(0.9)
        >>> bool((low < prediction.mean).all() and (prediction.mean < high).all())
        True
    """

    mean: Tensor
    covariance: Tensor
    shares: tuple[SourceShare, ...] = ()
    input_variance: Tensor | None = None
    reliable: Tensor | None = None
    diagonal_var: Tensor | None = None
    linearized: dict[str, str] = field(default_factory=dict)
    draws: Tensor | None = None

    @property
    def var(self) -> Tensor:
        """The variance of every output."""
        return self.covariance.diagonal(dim1=-2, dim2=-1)

    @property
    def std(self) -> Tensor:
        """The standard deviation of every output."""
        return safe_sqrt(self.var)

    def interval(self, probability: float = 0.9) -> tuple[Tensor, Tensor]:
        """Lower and upper ends of central intervals that hold a Gaussian output with a probability.

        Args:
            probability: Between 0 and 1.

        Returns:
            Two tensors of the mean's shape.

        Raises:
            ValueError: If the probability does not lie between 0 and 1.

        Example:
            >>> import torch, varprop as vp
            >>> prediction = vp.Prediction(torch.zeros(1, 1), torch.ones(1, 1, 1))
            >>> [round(end.item(), 3) for end in prediction.interval(0.95)]
            [-1.96, 1.96]
        """
        if not 0 < (probability := float(probability)) < 1:
            raise ValueError(f"A probability lies between 0 and 1, not at {probability}.")
        half = torch.special.ndtri(torch.tensor((1 + probability) / 2, dtype=torch.float64)).item() * self.std
        return self.mean - half, self.mean + half

    def probabilities(self) -> Tensor:
        """The expected softmax of the outputs under their covariance, by 512 quasi-random points.

        Returns:
            Probabilities, (batch, outputs).

        Example:
            >>> import torch, varprop as vp
            >>> logits = vp.Prediction(torch.tensor([[2.0, 0.0]]), 4 * torch.eye(2)[None])
            >>> bool(logits.probabilities()[0, 0] < torch.softmax(logits.mean, -1)[0, 0])  # less sure
            True
        """
        factor = _root(self.covariance)
        points = torch.quasirandom.SobolEngine(self.mean.shape[-1], scramble=True, seed=0).draw(POINTS)
        normal = torch.special.ndtri(points.double().clamp(1e-7, 1 - 1e-7)).to(self.mean)
        total = torch.zeros_like(self.mean)
        for part in normal.split(64):
            total += torch.softmax(self.mean + torch.einsum("bij,nj->nbi", factor, part), -1).sum(0)
        return total / POINTS

    def sources(self, output: int | None = None) -> list[tuple[str, str, float]]:
        """Name, kind and share of the variance of every source, the largest first, averaged over the samples.

        Args:
            output: The output to look at; all together if left out.

        Returns:
            Tuples, whose shares sum to 1.

        Raises:
            ValueError: If there is no such output.

        Example:
            >>> import torch, varprop as vp
            >>> model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(3, 1))
            >>> vp.predict(model, torch.ones(2, 3)).sources()
            [('0', 'dropout', 1.0)]
        """
        outputs = self.mean.shape[1]
        if output is not None and (not isinstance(output, int) or not -outputs <= output < outputs):
            raise ValueError(f"There is no output {output!r}: the prediction has {outputs}.")
        chosen = slice(None) if output is None else slice(output % outputs, output % outputs + 1)
        total = sum((share.variance[:, chosen] for share in self.shares), torch.zeros(()))
        total = torch.as_tensor(total).sum(1).clamp_min(torch.finfo(self.mean.dtype).tiny)
        rows = [(s.name, s.kind, float((s.variance[:, chosen].sum(1) / total).mean())) for s in self.shares]
        return sorted(rows, key=lambda row: -row[2])

    def table(self) -> str:
        """The sources as a table of text.

        Returns:
            Lines of text, the largest share first.

        Example:
            >>> model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1))
            >>> prediction = vp.predict(model, torch.ones(2, 3))
            >>> print(prediction.table())
            source  kind     share of the variance
            --------------------------------------
            0       dropout  100.0 %
        """
        rows = [(name, kind, f"{100 * share:.1f} %") for name, kind, share in self.sources()]
        return text_table(("source", "kind", "share of the variance"), rows)

    def plot(self, axes: Any = None) -> Any:
        """Bars of the sources' shares, by matplotlib; returns the axes.

        Args:
            axes: Matplotlib axes to draw on; new ones if left out.

        Returns:
            The axes.

        Raises:
            ImportError: If matplotlib is not installed.

        Example:
            >>> model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1))
            >>> prediction = vp.predict(model, torch.ones(2, 3))
            >>> prediction.plot().get_xlabel()
            'share of the variance, %'
        """
        if axes is None:
            try:
                from matplotlib import pyplot
            except ImportError as error:
                raise ImportError("Prediction.plot needs matplotlib: pip install matplotlib.") from error
            axes = pyplot.figure(figsize=(6, 0.4 + 0.25 * len(self.shares)), layout="constrained").gca()
        rows = self.sources()[::-1]
        axes.barh([f"{name} ({kind})" for name, kind, _ in rows], [100 * share for _, _, share in rows])
        axes.set_xlabel("share of the variance, %")
        return axes

    def __repr__(self) -> str:
        batch, outputs = self.mean.shape
        doubtful = "" if self.reliable is None else f", {int((~self.reliable).sum())} of {batch} samples doubtful"
        return f"Prediction({batch} samples, {outputs} outputs{doubtful})\n{self.table()}"


def each_tensor(prediction: Prediction, change: Callable[[Tensor], Tensor]) -> Prediction:
    """A prediction without draws, all tensors of which went through a function."""

    def changed(value: Tensor | None) -> Tensor | None:
        return None if value is None else change(value)

    return replace(
        prediction,
        mean=change(prediction.mean),
        covariance=change(prediction.covariance),
        shares=tuple(replace(share, variance=change(share.variance)) for share in prediction.shares),
        input_variance=changed(prediction.input_variance),
        reliable=changed(prediction.reliable),
        diagonal_var=changed(prediction.diagonal_var),
    )


def _root(covariance: Tensor) -> Tensor:
    """A matrix whose product with its transpose is the covariance, also where that has no full rank."""
    values, vectors = torch.linalg.eigh(covariance.double())
    root: Tensor = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)).to(covariance.dtype)
    return root
