"""How one dense MLP becomes a shared expert, routed experts and a router, from what it computed.

An MLP is a sum over its neurons: y = sum of activation[n] * down[:, n]. Any partition of the
neurons into experts gives the same sum as long as every expert is asked; which experts can be left
out for a token depends on how unevenly their parts of the sum are distributed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

CLUSTER_ROUNDS = 6
ROUTER_RIDGE = 0.01  # of the mean diagonal of the Gram matrix
REFIT_RIDGE = 0.03


@dataclass(frozen=True, slots=True)
class Partition:
    """Which neuron belongs where; rows of gate and up, columns of down."""

    shared: torch.Tensor  # [shared]
    experts: torch.Tensor  # [experts, width]


def partition(
    activations: torch.Tensor, down: torch.Tensor, num_experts: int, width: int, seed: int
) -> Partition:
    """Shared are the neurons that add most on average; the others are grouped by co-activation.

    activations: [tokens, inner], down: [hidden, inner]
    """
    sizes = activations.abs() * down.norm(dim=0)  # [tokens, inner]: how much each neuron adds
    order = sizes.mean(0).argsort(descending=True)
    count = len(order) - num_experts * width
    shared, routed = order[:count].sort().values, order[count:].sort().values
    # Two neurons are alike when they add much for the same tokens, whatever their averages are.
    features = sizes[:, routed].T
    features = functional.normalize(features - features.mean(1, keepdim=True), dim=1)
    labels = balanced_clusters(features, num_experts, seed)
    experts = torch.stack([routed[labels == expert] for expert in range(num_experts)])
    return Partition(shared, experts)


def balanced_clusters(features: torch.Tensor, num_clusters: int, seed: int) -> torch.Tensor:
    """k-means on unit rows [rows, dims] with clusters of equal size; a label for each row.

    The pairs (row, centre) are taken from the most similar on, a pair whose row is placed or whose
    cluster is full is passed over: not the best assignment, but close to it and quick.
    """
    num_rows = len(features)
    if num_rows % num_clusters:
        raise ValueError(f"rows must be a multiple of {num_clusters} clusters; got {num_rows}")
    generator = torch.Generator().manual_seed(seed)
    centres = features[torch.randperm(num_rows, generator=generator)[:num_clusters]]
    labels: list[int | None] = []
    for _ in range(CLUSTER_ROUNDS):
        similarity = features @ centres.T
        labels = [None] * num_rows
        room = [num_rows // num_clusters] * num_clusters
        for pair in similarity.flatten().argsort(descending=True, stable=True).tolist():
            row, cluster = divmod(pair, num_clusters)
            if labels[row] is None and room[cluster]:
                labels[row] = cluster
                room[cluster] -= 1
        found = torch.tensor(labels)
        centres = torch.stack([features[found == each].mean(0) for each in range(num_clusters)])
        centres = functional.normalize(centres, dim=1)
    return torch.tensor(labels)


def output_norms(
    activations: torch.Tensor, down: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    """Norm of what each expert adds to each token, [tokens, experts]."""
    return torch.stack(
        [(activations[:, neurons] @ down[:, neurons].T).norm(dim=1) for neurons in experts], dim=1
    )


def fit_router(inputs: torch.Tensor, norms: torch.Tensor, spread: float) -> torch.Tensor:
    """A matrix [experts, hidden] whose products with `inputs` rank the experts by their `norms`.

    Ridge regression of how far each expert's norm is from the mean of the token's: what is common
    to all changes no choice and would cost precision. Nor does the scale, so it is chosen such
    that logits scatter by `spread`: the softmax of nearly equal logits is nearly equal weights.
    """
    fitted = ridge(inputs, norms - norms.mean(1, keepdim=True), ROUTER_RIDGE)
    logits = inputs @ fitted
    fitted *= spread / logits.std().clamp_min(1e-20)
    return fitted.T.contiguous()


def ridge(inputs: torch.Tensor, targets: torch.Tensor, strength: float) -> torch.Tensor:
    """The least-squares matrix [inputs, targets], held back towards zero."""
    gram = inputs.T @ inputs
    gram.diagonal().add_(strength * gram.diagonal().mean().clamp_min(1e-20))
    return torch.linalg.solve(gram, inputs.T @ targets)


def chosen_neurons(logits: torch.Tensor, parts: Partition, top_k: int) -> torch.Tensor:
    """1 for each neuron that takes part, 0 for the others, [..., inner]."""
    inner = parts.shared.numel() + parts.experts.numel()
    chosen = torch.zeros_like(logits).scatter(-1, logits.topk(top_k, dim=-1).indices, 1.0)
    mask = torch.ones(*logits.shape[:-1], inner)
    mask[..., parts.experts.flatten()] = chosen.repeat_interleave(parts.experts.shape[1], dim=-1)
    return mask
