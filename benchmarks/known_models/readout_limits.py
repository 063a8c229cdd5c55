"""How closely can a read-out point at the gradients of the ResNet-20? Three kinds of map, fitted by ridge regression.

After 488 steps of the row "learnt read-out", the gradient at every position of a point is predicted from

- the error of the scores, by one matrix for the point: the best that the learnt read-out can reach;
- the error of the scores and its products with the activations at that position: feedback that each record modulates;
- the gradient at the same position of the last point's output, on a coarser grid: an error as rich as the stream.

Each map is fitted to some positions of three batches. The figure is the cosine with the true gradient of another batch.

    OPUSIM_DATA=... python -m benchmarks.known_models.readout_limits     (some minutes of one core)
"""

from __future__ import annotations

from dataclasses import replace

import torch
from sklearn.linear_model import Ridge
from torch import Tensor
from torch.nn import functional

from benchmarks.known_models.images import COMMON, READOUT, Images, task_of
from benchmarks.known_models.readout_rules import watched
from benchmarks.known_models.training import CACHE, Training
from benchmarks.results_file import save_results
from opusim import FeedbackAlignment

NAME, STEPS, POSITIONS, RIDGE = "readout_limits", 488, 8_000, 1e-3
MAPS = ("error of the scores", "and its products with activations", "gradient at the last point")


def features(error: Tensor, h: Tensor, last: Tensor) -> dict[str, Tensor]:
    """Return what each map sees at every position, shape (records, positions, features)."""
    stream = h.flatten(2).transpose(1, 2)
    scores = error[:, None].expand(-1, stream.shape[1], -1)
    products = (scores[..., None] * stream[..., None, :]).flatten(2)
    coarse = functional.interpolate(last, size=h.shape[2:], mode="nearest").flatten(2).transpose(1, 2)
    return dict(zip(MAPS, (scores, torch.cat([scores, products], dim=2), coarse), strict=True))


Gradients = tuple[Tensor, list[Tensor], list[Tensor]]


def gradients(task: Images, feedback: FeedbackAlignment, step: int) -> Gradients:
    """Return the error of the scores, and the outputs of the points and the loss's gradients there."""
    x, y = task.batch(1, step)
    with feedback.backpropagating(), watched(feedback.model, feedback.points) as seen:
        scores = feedback.model(x)
    outputs = [seen[name] for name in feedback.points]
    loss = functional.cross_entropy(scores, y, reduction="sum")
    error, *found = torch.autograd.grad(loss, [scores, *outputs])
    return error, [h.detach() for h in outputs], found


def measure() -> None:
    """Train, fit the maps of every point, and print and keep their cosines."""
    torch.set_num_threads(1)
    task = replace(task_of("resnet"), name=NAME, steps=STEPS)
    training = Training(task, COMMON[READOUT], 0, CACHE / NAME / "0.pt")
    training.finish()
    feedback = training.feedback
    assert feedback is not None
    *fitted, other = (gradients(task, feedback, step) for step in range(4))
    generator, rows = torch.Generator().manual_seed(0), []
    for number in range(len(other[1])):
        cosines = {}
        for name in MAPS:
            seen, wanted = [], []
            for error, outputs, grads in (*fitted, other):
                x = features(error, outputs[number], grads[-1])[name].flatten(0, 1)
                kept = torch.randperm(len(x), generator=generator)[:POSITIONS]
                seen.append(x[kept])
                wanted.append(grads[number].flatten(2).transpose(1, 2).flatten(0, 1)[kept])
            x, y = torch.cat(seen[:-1]), torch.cat(wanted[:-1])
            fit = Ridge(alpha=RIDGE * float(x.square().sum(0).mean()), fit_intercept=False).fit(x, y)
            predicted, true = torch.from_numpy(fit.predict(seen[-1])).flatten(), wanted[-1].flatten()
            cosines[name] = float(functional.cosine_similarity(predicted, true, dim=0))
        rows.append({"point": feedback.points[number], **cosines})
        print(rows[-1], flush=True)
    save_results(NAME, {"steps": STEPS, "rows": rows})


if __name__ == "__main__":
    measure()
