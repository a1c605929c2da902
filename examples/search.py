"""Search for settings with optuna: every trial is a run, scored by validation alone.

python examples/search.py                                 # twenty trials of the preset null, about an hour
python examples/search.py smoke 3                         # only to see that everything works
python examples/search.py vision-central 20 OUT.toml      # and the best settings, for `atlas run --config OUT.toml`

Change `propose` to search for other settings. A trial follows from the seed and the trials before it, and a finished
run is only read: so the same command goes on where it was stopped, and a larger number of trials adds to it.
Sampler: tree-structured Parzen estimators, Bergstra, Bardenet, Bengio, Kegl, "Algorithms for Hyper-Parameter
Optimization" (NeurIPS 2011). Install it with `pip install '.[search]'`.
"""

import sys
from pathlib import Path
from typing import Any

import optuna

from atlas_fl import Config, find_preset, run_config, to_toml, validate, with_values


def propose(trial: optuna.Trial) -> dict[str, Any]:
    """The settings of a trial, by the names of flags."""
    return {
        "lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True),
        "local_epochs": trial.suggest_int("local_epochs", 1, 3),
        "schedule": trial.suggest_categorical("schedule", ["constant", "cosine"]),
    }


def search(base: Config, trials: int) -> Config:
    """Run so many trials, print each, and return the settings of the best."""
    configs = []

    def score(trial: optuna.Trial) -> float:
        configs.append(validate(with_values(base, propose(trial))))
        result = run_config(configs[-1], resume=True)
        best = result.summary["best"]
        found = f"{best['validation']:.4f} in round {best['round']}"
        print(f"trial {trial.number}: {found}, {trial.params}, {result.folder}")
        return float(best["validation"])

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=base.run.seed))
    study.optimize(score, n_trials=trials)
    print(f"best: trial {study.best_trial.number}, {study.best_value:.4f}, {study.best_params}")
    return configs[study.best_trial.number]


def main(preset: str = "null", trials: str = "20", out: str = "") -> None:
    best = search(find_preset(preset), int(trials))
    if out:
        Path(out).write_text(to_toml(best), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
