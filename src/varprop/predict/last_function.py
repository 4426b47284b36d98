"""A function of elements at the very end of a network, such as a sigmoid.

Activations inside a network are smoothed over variances for which units are independent: far too little of them at the
end of a trained network. Up to the last function a prediction knows the whole variance, and smooths that one over it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..engine.api import plan_for
from ..engine.plan import Plan
from ..graph.node import Node, TensorInfo
from ..graph.program import Program
from ..moments import Moments
from .adjoint import kind_of, precise
from .curves import SlopedClusters, left_by_slopes
from .prediction import Prediction, SourceShare
from .reliability import CURVED


@dataclass(frozen=True)
class LastFunction:
    """The function of elements in which a network ends."""

    plan: Plan  # of the whole network
    node: Node
    before: Plan  # of the network without the function

    @staticmethod
    def of(plan: Plan, random: Iterable[Node]) -> LastFunction | None:
        """The function at the end of a network; None if that does not end in a curved function of Gaussian elements.

        Args:
            plan: Which values are random.
            random: Inputs and parameters that are.
        """
        program: Program = plan.program
        node = program.outputs[0]
        while _is_reshape(plan, node):
            node = node.args[0]
        root = plan.root.get(node, node)
        if not plan.inside_cluster(node) or root not in program.nodes or node in plan.skips:
            return None
        drawn = plan.rules.get(root)
        if plan.mixture(root) is not None or (drawn and (drawn.kind == "source" or drawn.outcomes)):
            return None
        path, known = SlopedClusters(plan, {}).path(node, root), program.tensors()
        if not all(_of_elements(plan, step, root, known) for step in path):
            return None
        nodes = program.nodes[: program.nodes.index(root) + 1]
        shorter = program.once(("before", root), lambda: replace(program, nodes=nodes, outputs=[root], facts={}))
        function = LastFunction(plan, node, plan_for(shorter, tuple(random)))
        return None if function._clusters().line(node)[0] is root else function

    def _clusters(self) -> SlopedClusters:
        tensors = self.plan.program.tensors().items()
        return SlopedClusters(self.plan, {n: precise(v.detach()) if isinstance(v, Tensor) else v for n, v in tensors})

    def after(self, prediction: Prediction, chosen: Tensor) -> Prediction:
        """The prediction behind the function.

        Args:
            prediction: That before it.
            chosen: The flat indices of the outputs that it is of, (outputs).
        """
        clusters, shape = self._clusters(), self.node.info.shape[1:]
        assert prediction.diagonal_var is not None and prediction.reliable is not None

        def whole(values: Tensor) -> Tensor:
            """Values of the chosen outputs in their places, (batch, *output)."""
            return values[:, :1].repeat(1, shape.numel()).index_copy(1, chosen, values).view(len(values), *shape)

        def moments(var: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            """Mean, variance and slope of the chosen outputs, and the variance that its line leaves."""
            x = Moments(whole(prediction.mean).requires_grad_(), whole(var))
            with torch.enable_grad():
                found = clusters.of_gaussian(self.node, self._root, x).dense()
                (slope,) = torch.autograd.grad(found.mean.sum(), x.mean)
            clusters.slopes.clear()
            left = left_by_slopes(found.var, [(x, slope)])
            return tuple(  # type: ignore[return-value]
                t.detach().reshape(len(var), -1)[:, chosen] for t in (found.mean, found.var, slope, left)
            )

        mean, _, slope, left = moments(prediction.var)
        covariance = slope.unsqueeze(-1) * prediction.covariance * slope.unsqueeze(-2) + torch.diag_embed(left)
        shares = [replace(share, variance=share.variance * slope.square()) for share in prediction.shares]
        curved = clusters.line(self.node)[0]
        name = curved.module or "(model)"
        shares.append(SourceShare(name, kind_of(curved, self.plan.rules[curved]), left))
        by_input = prediction.input_variance
        if by_input is not None:
            by_input = by_input * slope.square().view(*slope.shape, *[1] * (by_input.ndim - 2))
        diagonal = moments(prediction.diagonal_var)[1]
        straight = left.sum(1) <= CURVED * covariance.diagonal(dim1=-2, dim2=-1).sum(1)
        return replace(
            prediction,
            mean=mean,
            covariance=covariance,
            shares=tuple(shares),
            input_variance=by_input,
            reliable=prediction.reliable & straight,
            diagonal_var=diagonal,
        )

    @property
    def _root(self) -> Node:
        return self.plan.root[self.node]


def _is_reshape(plan: Plan, node: Node) -> bool:
    """True if an operation gives the elements of its random argument, in their order, in another shape."""
    rule = plan.rules.get(node) if plan.random(node) else None
    return rule is not None and rule.operation == "view" and node.info.shape.numel() == node.args[0].info.shape.numel()


def _of_elements(plan: Plan, step: Node, root: Node, known: dict[Node, object]) -> bool:
    """True if an operation gives a value for every element of the root, by it and by what all samples share."""
    if not isinstance(step.info, TensorInfo) or step.info.shape != root.info.shape or not step.info.is_floating:
        return False
    others = [operand for operand in step.operands if not plan.random(operand)]
    return all(o in known and (o.info.shape[:1] == (1,) or len(o.info.shape) < len(root.info.shape)) for o in others)
