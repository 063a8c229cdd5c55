"""Hand a run over to SACRO-ML, which attacks models at the exit of a trusted research environment.

python examples/sacro_ml.py RUN TARGET

The folder TARGET then holds what SACRO-ML 2.0 reads of a model that it need not run: the model's probabilities for
training and test records, and the run's statement (docs/privacy.md) among the results of disclosure checks. If
SACRO-ML is installed, its worst-case attack plays membership inference and prints the area under its curve: 0.5 is
guessing, and an epsilon bounds it from above. TARGET holds figures of private records, so it must not leave with the
model.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

import opusim
from opusim.training.engine.plan import RunPlan
from opusim.training.runs.folder import RunFolder, stated


def write_target(run: Path, target: Path) -> None:
    """Write a folder that `sacroml.attacks.target.Target.load` reads."""
    model, dataset = opusim.load_run(run).model, RunPlan.stored(RunFolder(run)).dataset
    target.mkdir()
    for name, split in (("train", dataset.train), ("test", dataset.test)):
        if split is None:
            raise ValueError(
                f"run {run} has no test records, and the attack compares with them; name some in data.test"
            )
        with torch.no_grad():
            probabilities = model(split.x).softmax(dim=-1).numpy()
        np.savetxt(target / f"proba_{name}.csv", probabilities, delimiter=",")
    content = {
        "dataset_name": dataset.name,
        "features": {},
        "safemodel": [{"statement.json": json.dumps(stated(run).to_json())}],
        **{f"proba_{name}_path": f"proba_{name}.csv" for name in ("train", "test")},
    }
    (target / "target.yaml").write_text(json.dumps(content, indent=1))  # JSON is YAML


def main() -> None:
    """Write the folder, and attack if SACRO-ML is there."""
    run, target = map(Path, sys.argv[1:])
    write_target(run, target)
    try:
        from sacroml.attacks.target import Target
        from sacroml.attacks.worst_case_attack import WorstCaseAttack
    except ImportError:
        print(f"written to {target}; SACRO-ML reads it with: sacroml run {target} ATTACK.yaml")
        return
    loaded = Target()
    loaded.load(str(target))
    (stated_guarantee, *_) = json.loads(loaded.safemodel[0]["statement.json"])["guarantees"]
    report = WorstCaseAttack(output_dir=str(target / "report"), n_reps=5, n_dummy_reps=0).attack(loaded)
    found = report["attack_experiment_logger"]["attack_instance_logger"].values()
    area = float(np.mean([each["AUC"] for each in found]))
    print(
        f"stated: epsilon {stated_guarantee['epsilon']:.3f}; SACRO-ML's worst case: area {area:.3f} under its curve"
    )


if __name__ == "__main__":
    main()
