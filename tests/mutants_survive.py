"""Take the protections of a run away, one by one, and see a test fail each time.

    python tests/mutants_survive.py            all of them, some twenty minutes
    python tests/mutants_survive.py seal       those whose name has a word

(what is taken away, file, what stands there, what stands there instead, the tests that must notice). The tests run on a
copy; a mutant that survives is a hole in them, and the exit code says so. docs/reliability.md is what they hold up.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 300
"""Seconds: without some protections a run would wait for ever, which is noticed too."""

MUTANTS = [
    ("no fsync", "files.py", "            os.fsync(file.fileno())\n", "", "core/test_files.py -k names_reach"),
    ("no folder fsync", "files.py", "        sync(path.parent)\n", "", "core/test_files.py -k names_reach"),
    ("no rename", "files.py", "    temporary = path.with_name(f\".{path.name}.{os.getpid()}.tmp\")", "    temporary = path", "core/test_files.py -k replaced_whole"),
    ("torn line raises", "records.py", " and b\"\\n\" in content:", ":", "core/test_records.py -k first_line"),
    ("records unbounded", "records.py", "0 < keep < len(files)", "False", "core/test_records.py -k every_second"),
    ("history unbounded", "alarms.py", "if len(values) > FIRST + 2 * NEWEST", "if False", "core/test_alarms.py -k long_run"),
    ("no alarm", "alarms.py", "_above, \"steps/skipped\", 0.0)", "_above, \"steps/none\", 0.0)", "core/test_alarms.py -k skipped"),
    ("checksum not compared", "engines/trl/checkpoints.py", "        if found != checksum:", "        if False:", "trl/test_resume.py -k damaged_checkpoint_is_reported"),
    ("no manifest needed", "engines/trl/checkpoints.py", "        return INTERRUPTED\n", "        return None\n", "trl/test_resume.py -k interrupted_checkpoint"),
    ("damaged kept in place", "engines/trl/checkpoints.py", "            path.rename(aside)\n", "            continue\n", "trl/test_resume.py -k damaged_checkpoint_is_reported"),
    ("rotation before manifest", "engines/trl/recorded.py", "limit, self.args.save_total_limit = self.args.save_total_limit, None", "limit = self.args.save_total_limit", "trl/test_resume.py -k only_when_the_new"),
    ("rotation by date", "engines/trl/recorded.py", "best_model_checkpoint)  # by step", "best_model_checkpoint, use_mtime=True)  # by step", "trl/test_resume.py -k rotated"),
    ("failed reward loses steps", "engines/trl/trainer.py", "            self._save_checkpoint(self.model, None)\n", "", "trl/test_resume.py -k loses_no_step"),
    ("no lock", "run/folder.py", "            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n", "            pass\n", "cli/test_trials.py -k in_use"),
    ("weights not checked", "engines/trl/launch.py", "    if not _weights_are_finite(trainer):", "    if False:", "cli/test_trials.py -k weights_that"),
    ("generation forgotten", "engines/trl/trainer.py", "\"generation\": self._buffered_inputs if self._step % every else None", "\"generation\": None", "trl/test_resume.py -k last_good"),
    ("stops alone", "engines/trl/launch.py", "any(gather_object([self._requested]))", "self._requested", "trl/test_failures.py -k stop_together"),
    ("micro-batches kept", "engines/trl/trainer.py", "        self._waiting, self._statistics = [], metrics", "        self._statistics = metrics", "trl/test_resume.py -k inside_a_step"),
    ("skipped steps forgotten", "engines/trl/recorded.py", "        self._nonfinite.restore(state[\"health\"])\n", "", "trl/test_nonfinite.py -k remembers"),
    ("gradient kept", "engines/trl/recorded.py", "            self.optimizer.zero_grad()\n", "", "trl/test_nonfinite.py -k 'skipped_and_counted and gradient'"),
    ("never stops", "engines/trl/nonfinite.py", "len(self._row) >= PATIENCE", "False", "trl/test_nonfinite.py -k 'three_in and gradient'"),
    ("rows not checked", "engines/trl/nonfinite.py", "    if not found:\n", "    if True:\n", "trl/test_nonfinite.py -k 'skipped_and_counted and reward'"),
    ("scored tokens not checked", "engines/trl/nonfinite.py", "            places[(~x.isfinite() & mask).any(-1)] = place\n", "            pass\n", "trl/test_nonfinite.py -k 'three_in and scored'"),
    ("trained tokens not checked", "engines/trl/metrics.py", "count = (~x.isfinite() & loss_mask(inputs)).sum()", "count = (x.isnan() & False).sum()", "trl/test_nonfinite.py -k 'skipped_and_counted and trained'"),
    ("norm not checked", "engines/trl/nonfinite.py", "None if math.isfinite(norm) else", "None if True else", "trl/test_nonfinite.py -k 'skipped_and_counted and gradient'"),
    ("masked read", "engines/trl/nonfinite.py", "(~x.isfinite() & mask).any(-1)", "(~x.isfinite()).any(-1)", "trl/test_nonfinite.py -k padding"),
    ("counts each step", "engines/trl/nonfinite.py", "if not again and not", "if not", "trl/test_nonfinite.py -k counts_once"),
    ("scaler stops", "engines/trl/nonfinite.py", " and not (scaled and only_gradient)", "", "trl/test_nonfinite.py -k overflow"),
    ("statistics poisoned", "engines/trl/nonfinite.py", "if not isinstance(x, float) or math.isfinite(x)", "if True", "trl/test_nonfinite.py -k 'skipped_and_counted and trained'"),
    ("sampling breaks", "engines/trl/trainer.py", "self.generation_config.remove_invalid_values = True", "pass", "trl/test_nonfinite.py -k nan_weights"),
    ("empty breaks", "engines/trl/trainer.py", "        if self.rollout_func is not None:", "        if False:", "trl/test_nonfinite.py -k 'single and gtpo'"),
    ("one process decides", "engines/trl/metrics.py", "accelerator.reduce(torch.stack(list(sums.values())), reduction=\"sum\")", "torch.stack(list(sums.values()))", "trl/test_nonfinite.py -k 'together and entropy'"),
    ("lost process not explained", "engines/trl/failures.py", "disk_full(error, folder) or process_lost(error, rank, processes)", "disk_full(error, folder)", "trl/test_failures.py -k survivor"),
    ("reversed sign", "engines/trl/trainer.py", "            loss = loss + term\n", "            loss = loss - term\n", "trl/test_settings.py -k likelier"),
    ("shaped twice", "engines/trl/trainer.py", "for_records=self._record_due", "for_records=True", "trl/test_credit.py -k shaped_once"),
    ("an algorithm by name", "engines/trl/trainer.py", "        if self.algorithm.paper is not None:", "        if self.algorithm.name == \"gtpo\":", "trl/test_own_algorithm.py -k is_named"),
    ("disk full not reported", "engines/trl/failures.py", "    return EngineError(Problem(what, why, remedy))", "    return None", "trl/test_survive_disk.py"),
    ("status hides it", "engines/trl/recorded.py", "            with suppress(OSError):", "            with suppress(KeyError):", "trl/test_survive_disk.py"),
    ("model in place", "engines/trl/launch.py", "part = folder.with_name(f\".{folder.name}.part\")", "part = folder", "trl/test_survive_kills.py -m slow -k 'half_the_model or half and model'"),
    ("no beginning again", "engines/trl/launch.py", "    if resume and checkpoint is None:\n", "    if resume and checkpoint is None:\n        raise SystemExit(3)\n", "trl/test_survive_kills.py -m slow -k 'once and run.json or once and before and scoring'"),
    ("no sweep", "files.py", "        path.unlink(missing_ok=True)\n\n\ndef remove", "        pass\n\n\ndef remove", "trl/test_survive_kills.py -m slow -k 'once and config'"),
    ("scores not asked", "records.py", "is_dir() and scored", "is_dir()", "trl/test_survive_kills.py -m slow -k 'once and scoring and after'"),
    ("report strict", "report/readers.py", "        except SchemaError:\n            raise\n        except RecordError as error:", "        except ZeroDivisionError as error:", "report/test_report.py -k damaged_file"),
]  # fmt: skip


def survives(file, old, new, tests):
    with tempfile.TemporaryDirectory() as home:
        copy = Path(home) / "copy"
        for part in ("src", "tests", "recipes", "locks"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        path = copy / "src/dew" / file
        text = path.read_text()
        assert old in text, f"{file} no longer has {old!r}"
        path.write_text(text.replace(old, new, 1))
        name, *others = shlex.split(tests)
        command = [sys.executable, "-m", "pytest", "-x", "-q", f"--basetemp={home}/pytest", f"tests/{name}", *others]
        environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(
            command, cwd=copy, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(LIMIT) != 1
        except subprocess.TimeoutExpired:
            return False
        finally:
            with_children(process)


def with_children(process):
    """End what it left behind: a test that was ended by the clock has children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


if __name__ == "__main__":
    words = sys.argv[1:]
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant[0] for word in words)]
    alive = 0
    for name, *mutant in chosen:
        lives = survives(*mutant)
        alive += lives
        print(f"{'SURVIVES' if lives else 'killed  '}  {name}", flush=True)
    sys.exit(alive > 0)
