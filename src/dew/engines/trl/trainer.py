"""DewTrainer: TRL's GRPOTrainer with one of dew's algorithms.

Its methods are in the order in which a batch reaches them (CONTRIBUTING.md, "The path of one batch").
"""

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from transformers.trainer_utils import TrainOutput
from trl import GRPOTrainer

from dew.compare.sampling import check_prompt
from dew.decoding import replaced, uncompiled
from dew.engines.compat import IMAGE_KEYS, answers_of, check_not_unsloth
from dew.engines.credit import Credit, Signals, give_credit
from dew.engines.recorder import Numbers, due
from dew.engines.trl import checkpoints, metrics, rollout
from dew.engines.trl.batch import Batch, Capture, first_rows, loss_mask, make_batch, with_trl_advantages
from dew.engines.trl.config import DewConfig
from dew.engines.trl.guide import Guide, MixedPolicy
from dew.engines.trl.loss import Head, compile_layers, loss_inputs, loss_part, observe_loss, update_parts
from dew.engines.trl.rewards import add_environments, check_rewards, checked
from dew.errors import ConfigError, Problem, quoted
from dew.run.config import loadable_model
from dew.run.settings import algorithm_settings

logger = logging.getLogger("dew")

LOGS_KEPT = 1000
"""Log entries that transformers keeps in memory and writes into every checkpoint; metrics.jsonl has all of them."""


class DewTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's GRPOTrainer with one of dew's algorithms.

    Takes the arguments of GRPOTrainer. `args` is a `DewConfig`, which names the algorithm. `guide` is a second policy
    that writes some of the answers (docs/trl.md).
    """

    _tag_names: ClassVar = [*GRPOTrainer._tag_names, "dew"]
    num_generations: int

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: DewConfig | None = None, train_dataset: Any = None,
        *others: Any, guide: Guide | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        check_not_unsloth()
        metrics.show_logs()
        if args is None:
            name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "")
            args = DewConfig(f"{Path(name).name or 'model'}-dew")
        if not isinstance(args, DewConfig):
            raise ConfigError(Problem(f"args is a {type(args).__name__}.", remedy="Write DewConfig(...)."))
        if isinstance(model, str):
            model = loadable_model(model, "model", (args.model_init_kwargs or {}).get("revision"))
        if problems := args.late_problems() + (args.guide_problems() if guide is not None else []):
            raise ConfigError(problems)
        several = isinstance(reward_funcs, list | tuple)
        rewards = list(reward_funcs) if several else [] if reward_funcs is None else [reward_funcs]
        if args.unnamed and train_dataset is not None and not rollout.can_redraw(train_dataset):
            args.algorithm_kwargs = {**algorithm_settings(args.algorithm_kwargs), "dynamic_sampling": False}
        self.algorithm = args.build_algorithm()
        self.described = checkpoints.described(self.algorithm)
        if not settings.get("environment_factory"):  # else the environment may provide columns and the reward
            check_rewards(rewards, args, None if settings.get("rollout_func") else train_dataset)
        args.batches.check_rows(train_dataset)
        self._name = self.algorithm.name
        if self.algorithm.paper is not None:
            self._paper = dict(self.algorithm.paper)
        limited = [checked(reward, args.reward_timeout) for reward in rewards]
        if args.use_vllm and args.vllm_mode == "server":
            logger.info("waiting up to %g s (vllm_server_timeout) for the vLLM server.", args.vllm_server_timeout)
        with rollout.loading_by_name(model), replaced([(args, "for_dew", True)]):
            super().__init__(model, limited, args, train_dataset, *others, **settings)
        rollout.check_inputs(self)
        # cuDNN's attention builds a plan for every new shape, which takes longer than a micro-batch. Since PyTorch 2.11
        # its gradient can also be NaN on Hopper at padded lengths of 64 modulo 128 (pytorch/pytorch#196678).
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.outcome_index = add_environments(self, len(rewards))
        if hasattr(self, "generation_config"):  # with NaN logits, sample noise: the step is skipped anyway
            self.generation_config.remove_invalid_values = True

        self._capture = Capture()
        self._captured_sampling = rollout.CapturedSampling(self)
        self._head = Head(self)
        compile_layers(self)
        self._stream = rollout.prompt_stream(self)
        guided = guide is not None or args.guide is not None
        self._mixed_policy = MixedPolicy(self, guide, train_dataset) if guided else None
        self._waiting: list[dict[str, Any]] = []
        self._statistics = metrics.StepStatistics()
        self._nonfinite = metrics.NonFinite()
        self._step_loss = 0.0
        self._unseen = math.inf
        """Number of answers that the current evaluation still needs; accelerate repeats rows to fill its last batch."""
        self._recorder = metrics.Recorder(args.output_dir, self.accelerator.is_main_process)
        self.add_callback(self._recorder)
        metrics.shorten_log_lines(self)
        for problem in args.warnings():
            logger.warning("%s", problem)

    @property
    def sharded(self) -> bool:
        """Whether a process may hold only part of the weights; all processes must then run equally many passes."""
        return bool(self.is_deepspeed_enabled or self.is_fsdp_enabled)

    @property
    def overrides_loss(self) -> bool:
        """Whether a subclass or an attribute may change the loss of each of TRL's micro-batches."""
        names = ("compute_loss", "_compute_loss")
        return any(getattr(getattr(self, x), "__func__", None) is not getattr(DewTrainer, x) for x in names)

    @property
    def group_size(self) -> int:
        return self.num_generations if self.model.training else self.num_generations_eval

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def _guide(self) -> MixedPolicy | None:
        return self._mixed_policy if self.model.training else None

    @property
    def _record_due(self) -> bool:
        steps = self.args.steps_per_generation * self.num_iterations / self.args.gradient_accumulation_steps
        return self.model.training and due(self.state.global_step + 1, self.args.records_every, steps)

    # ── start and end ───────────────────────────────────────────────────────────────────────────────────────

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train like TRL's trainer. `resume_from_checkpoint=True` resumes from the newest complete checkpoint."""
        self._waiting, self._statistics = [], metrics.StepStatistics()  # discard those of an interrupted step
        checkpoint = resume_from_checkpoint or None
        if checkpoint is None:
            checkpoints.claim_folder(self.args, self.accelerator)
        self._recorder.start(self)
        self._say_how()
        with checkpoints.explain_full_disk(self.args.output_dir), self._recorder.running():
            if checkpoint is True:
                checkpoint = checkpoints.last_good(self.args.output_dir, self.accelerator)
                if checkpoint is None:
                    what = f"resume: {self.args.output_dir} has no complete checkpoint."
                    raise ConfigError(Problem(what, remedy="Start without resume_from_checkpoint."))
            adapter = is_peft_model(self.model)
            finished = checkpoints.finished(str(checkpoint), self.args, adapter) if checkpoint else None
            if finished is None:
                result = super().train(checkpoint, *args, **kwargs)
            else:  # transformers would train one more step
                self._load_from_checkpoint(checkpoint)
                self.state, result = finished, TrainOutput(finished.global_step, 0.0, {})
        self._last_loaded_step = -1  # vLLM does not have the best checkpoint's weights, loaded at the same step
        held = ", ".join(f"{name} at {n} step{'s' * (n > 1)}" for name, n in self._recorder.alarms.steps.items())
        alarms = f" Alarms: {held}." if held else ""
        folder = quoted(self.args.output_dir)
        logger.info("done at step %d.%s See: dew report %s", self.state.global_step, alarms, folder)
        return result

    def _say_how(self) -> None:
        """Log algorithm, batch sizes and sampler in one line; a warning if the sampler is unexpectedly `generate`."""
        reason, args = self._captured_sampling.refused(), self.args
        sampler = "vLLM" if self.use_vllm else "CUDA graphs" if reason is None else f"generate ({reason})"
        unexpected = reason is not None and args.captured_sampling and torch.cuda.is_available() and not self.use_vllm
        level, text = logging.WARNING if unexpected else logging.INFO, "training with %s: %s; sampling with %s."
        logger.log(level, text, self.algorithm.label, args.batches, sampler)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        self._sampler = super()._get_train_sampler(*args, **kwargs)
        return self._sampler

    # ── a generation: sample, score, credit, report ─────────────────────────────────────────────────────────

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self._stream is not None and self.model.training:
            batch = self._sample_until_full(self._stream)
        else:
            batch = self.sample(inputs)
        if not self.model.training:
            batch, self._unseen = first_rows(batch, self._unseen, self.group_size), self._unseen - len(batch.group)
        with self._recorder.phase("credit"):
            alone = None if self._guide is None else self._guide.solved_alone(batch)
            credit = give_credit(self.algorithm, batch, apart=alone, for_records=self._record_due)
            if self.algorithm.engine_loss:
                credit = with_trl_advantages(credit, batch, self.accelerator)
            trained = loss_inputs(self.algorithm, batch, credit, self.accelerator)
            if self._guide is not None and alone is not None:
                columns, numbers = self._guide.weigh(batch, credit, alone)
                trained |= columns
                self._put(numbers)
        self._report(batch, credit)
        return trained

    def _report(self, batch: Batch, credit: Credit) -> None:
        numbers, outcomes = metrics.generation_metrics(self, batch, credit), batch.answers["outcome"]
        if self.model.training:
            self._put(numbers)
            step, chosen = self.state.global_step + 1, "threshold" in (self.args.algorithm_kwargs or {})
            self._recorder.check_rewards(step, self.algorithm, outcomes, credit.advantages, chosen)
            trains = batch.filler.all() | ~batch.filler  # fillers count if nothing else is left
            parts, finite, advantages = (x[trains] for x in (batch.parts, batch.finite, credit.advantages))
            self._nonfinite.start(metrics.not_finite(parts, finite, advantages, self.reward_func_names))
            if self._step == 0:
                longest, config = int(batch.inputs["prompt_mask"].sum(-1).max()), self.model.config.get_text_config()
                if problem := self.args.context_problem(longest, getattr(config, "max_position_embeddings", None)):
                    logger.warning("%s", problem)
        else:
            numbers |= metrics.pass_at(outcomes, self.algorithm.threshold, self.group_size)
            self._put(numbers, weight=batch.groups["sampled"])  # the last batch may have fewer prompts
        if self._stream is None or not self.model.training:
            means = (credit.advantages.sum(-1) / batch.mask.sum(-1).clamp_min(1)).tolist()
            shown = self._logs["advantages"]
            rows = [*list(shown)[: -len(means)], *means]
            shown.clear()
            shown.extend(rows)
        if self._record_due:
            self._recorder.record(batch, credit, self)

    def _sample_until_full(self, stream: rollout.PromptStream) -> Batch:
        """Sample dynamically, with prompts from the stream instead of TRL's data loader."""
        size, pad, accelerator = self.num_generations, self._tokenizer.pad_token_id, self.accelerator

        def sample(prompts: list[int]) -> Batch:
            rows = [self.train_dataset[i] for i in prompts for _ in range(size)]
            count = len(rows) // accelerator.num_processes
            return self.sample([dict(row) for row in rows[accelerator.process_index * count :][:count]])

        fills = {"prompt_ids": pad, "completion_ids": pad, "tool_mask": 1, "importance_sampling_ratio": 1}
        quota, whole = self.args.generation_batch_size // size, self._guide is not None
        settings = {"quota": quota, "size": size, "whole_groups": whole, "fills": fills}
        return rollout.fill_batch(sample, self.algorithm, stream, accelerator, **settings)

    def sample(self, rows: list[dict[str, Any]]) -> Batch:
        """Generate and score one answer per row, without training. A prompt has one row per answer of its group."""
        rewards = self._metrics[self._mode]["reward"]
        before = len(rewards)
        capture = self._capture = Capture()
        score = partial(self._score, self._calculate_rewards)
        with self._recorder.phase("scoring"), replaced([(self, "_calculate_rewards", score)]):
            inputs = super()._generate_and_score_completions(rows)
            del rewards[before:]  # dew reports the reward itself, without the guide's answers
            old = self._old_policy(inputs)
        if (sampler := inputs.get("sampling_per_token_logps")) is not None and old.logp is not None:
            self._put(metrics.sampler_metrics(old.logp, sampler, loss_mask(inputs), self.accelerator))
        recorded = rows if self._record_due else None
        batch = make_batch(self, inputs, capture, old, recorded)
        return batch if self._guide is None else self._guide.mark(batch)

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        if None in prompts and self.rollout_func is None:  # streamed data is not checked in advance
            check_prompt(self.processing_class, None)
        with self._recorder.phase("generation"), rollout.dropout_off(self.model), uncompiled(self.model):
            trl = super()._generate
            generated = trl(prompts) if self._guide is None else self._guide.generate(prompts, trl)
        self._capture.completion_ids, self._capture.tool_mask = answers_of(generated)
        return generated

    def sampling_model(self) -> Any:
        return self._captured_sampling.current_model()

    def _generate_single_turn(self, prompt_ids: list[list[int]], images: Any = None, *args: Any, **kwargs: Any) -> Any:
        sampled = self._captured_sampling.generate(prompt_ids) if images is None else None
        if sampled is not None:
            self._capture.sampled.append(sampled)
            return sampled[0], None
        return super()._generate_single_turn(prompt_ids, images, *args, **kwargs)

    def _score(self, trl: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Called in place of `_calculate_rewards`, after a subclass that changes the rewards."""
        with self._recorder.phase("reward"):
            found = trl(*args, **kwargs)
        # NaN means that a function returned None ("does not apply"), but from a reward model it is an error.
        models = torch.tensor([isinstance(f, torch.nn.Module) for f in self.reward_funcs], device=found.device)
        self._capture.parts = found.masked_fill(found.isnan() & models, torch.inf)
        self._capture.extra = dict(self._pending_extra_logs)
        return self._capture.parts.masked_fill(self._capture.parts.isinf(), torch.nan)

    def _get_per_token_logps_and_entropies(
        self, model: Any, ids: Tensor, mask: Tensor, keep: int, batch_size: int | None = None, **kwargs: Any
    ) -> tuple[Any, Any, Any]:
        """Return (B, T) log-probabilities and entropies, and the router's loss. Every pass goes through this method."""
        trl, scoring = super()._get_per_token_logps_and_entropies, not torch.is_grad_enabled()
        with rollout.dropout_off(model) if scoring else nullcontext():
            signals, aux = self._head(trl, model, ids, mask, keep, batch_size, **kwargs)
        if scoring or self.algorithm.engine_loss:
            self._capture.passes.append(signals)
        return signals.logp, signals.entropy, aux

    def _forward(self, model: Any, inputs: Mapping[str, Any], **kwargs: Any) -> tuple[Tensor, Tensor, Any]:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        kwargs |= {key: inputs[key] for key in (*IMAGE_KEYS, "longest") if inputs.get(key) is not None}
        T, score = inputs["completion_ids"].size(1), self._get_per_token_logps_and_entropies
        logp, entropy, aux = score(model, ids, mask, T, compute_entropy=True, **kwargs)
        assert entropy is not None
        return logp, entropy, aux

    def _old_policy(self, inputs: dict[str, Any]) -> Signals:
        """Return the signals of the sampling policy: from TRL's scoring pass, the sampler, or a pass by dew."""
        args, algorithm = self.args, self.algorithm
        for scored in self._capture.passes:
            if scored.logp is inputs.get("old_per_token_logps"):
                return scored
        if not (algorithm.signals or self._record_due):
            return Signals()
        if not algorithm.needs_sum_sq and (sampled := self._captured_sampling.signals(inputs, self._capture)):
            return sampled
        rows = args.per_device_train_batch_size if self.model.training else args.per_device_eval_batch_size
        with torch.no_grad():
            self._forward(self.model, inputs, batch_size=rows)
        return self._capture.passes[-1]

    # ── the update ──────────────────────────────────────────────────────────────────────────────────────────

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Return the loss of a micro-batch. With aligned rows, the last one of an optimizer step trains all of them."""
        compute = self._trl_loss if self.algorithm.engine_loss else self._loss
        if not self.model.training:
            loss = compute(model, inputs)
            self._statistics.add_loss(loss)
            self._put(self._statistics.read(self.accelerator))
            return loss
        if self.algorithm.engine_loss or not self._head.aligned:
            return compute(model, inputs)
        self._waiting.append(inputs)
        one_generation = self.args.steps_per_generation % self.args.gradient_accumulation_steps == 0
        if one_generation and not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        rows, skip = self.args.per_device_train_batch_size, self.algorithm.no_loss_without_advantage
        *parts, last = update_parts(self._waiting, rows, skip)
        self._waiting = []
        done = torch.zeros((), device=self.accelerator.device)
        for part in parts:
            with self.accelerator.no_sync(model):
                loss = self._loss(model, part)
                self.accelerator.backward(loss)
            done += loss.detach()
        return self._loss(model, last) + done

    def _loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        logp, entropy, aux = self._forward(model, inputs, compute_aux_loss=self.aux_loss_enabled)
        # `divisor` is for the whole generation. An optimizer step takes its share, and DDP averages over processes.
        steps = self.current_gradient_accumulation_steps if self.model.training else 1
        share = steps / self.args.steps_per_generation if self.model.training else 1.0
        count = inputs["divisor"] * share / self.accelerator.num_processes
        part = loss_part(inputs, logp, entropy)
        parts = {"": (logp, part)} if self._guide is None else self._guide.parts(inputs, logp, part)
        loss = torch.zeros((), device=logp.device)
        for name, (part_logp, part) in parts.items():
            term, stats = self.algorithm.loss(part_logp, part, inputs["advantages"], count=count)
            loss = loss + term
            self._statistics.add({name + stat: value for stat, value in stats.items()}, part.mask.sum())
        trained = parts[""][1].mask & (not inputs.get("idle"))
        self._statistics.add_entropy(inputs["verdict"], trained, entropy)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux / steps
        return loss

    def _trl_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        capture = self._capture = Capture()
        loss: Tensor = super()._compute_loss(model, inputs)
        self._metrics[self._mode]["entropy"].pop()  # a mean over a micro-batch; dew reports the mean over the step
        observe_loss(self, inputs, capture.passes[-1])
        return loss

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        self._statistics.add_loss(loss)
        if self.accelerator.sync_gradients:
            numbers = self._statistics.read(self.accelerator)
            self._step_loss = numbers.get("loss", 0.0)
            self._put(numbers)
        return loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        """Called before the update: clear the gradient of a step that is not finite."""
        norm = super()._get_grad_norm(*args, **kwargs)
        value = float(norm) if norm is not None else 0.0
        step, scaler = self.state.global_step + 1, self.accelerator.scaler
        scaled = scaler is not None and scaler.get_scale() > 1
        if found := self._nonfinite.check(step, value, loss=self._step_loss, scaled=scaled):
            self.optimizer.zero_grad()
            logger.warning("Skipping step %d, which is not finite: %s", step, found)
        of_credit = found is not None and found.startswith(("reward", "advantages"))
        self._put({"steps/skipped": float(found is not None), "steps/credit_not_finite": float(of_credit)})
        if norm is not None:
            self._recorder.put(metrics.finite_only({"grad_norm": value}))
        return norm

    # ── metrics and logs ────────────────────────────────────────────────────────────────────────────────────

    def _put(self, numbers: Numbers, weight: int = 1) -> None:
        """Report to the trackers (every `logging_steps` steps) and to the run's folder (every step)."""
        numbers = metrics.finite_only(numbers)
        for name, value in numbers.items():
            self._metrics[self._mode][name] += [value] * weight
        if self.model.training:
            self._recorder.put(numbers)

    def evaluation_loop(self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Rename `eval_reward` to `eval_<set>_reward`: TRL uses the same metric names for every evaluation set."""
        data = dataloader.dataset
        self._unseen = len(data) * self.num_generations_eval if hasattr(data, "__len__") else math.inf
        output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        if metric_key_prefix.startswith("eval_"):
            found = self._metrics["eval"]
            for name in list(found):
                found[f"{metric_key_prefix.removeprefix('eval_')}_{name}"] = found.pop(name)
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        for found in self._metrics.values():
            for name in list(found):
                found[name][:] = [x for x in found[name] if math.isfinite(x)]
                if not found[name]:
                    del found[name]
        for name in set(logs) - set(metrics.finite_only(logs)):
            del logs[name]  # in place: TRL adds the metrics of an evaluation to this dictionary
        if self.log_completions:
            for rows in (self._logs["prompt"], self._logs["completion"]):
                texts = [metrics.with_text_arguments(messages) for messages in rows]
                rows.clear()
                rows.extend(texts)
        super().log(logs, start_time)
        del self.state.log_history[:-LOGS_KEPT]
        self._recorder.logged(self.state.global_step, logs)

    # ── checkpoints ─────────────────────────────────────────────────────────────────────────────────────────

    def _own_state(self) -> dict[str, Any]:
        every = self.args.steps_per_generation * self.num_iterations
        return {
            "batches": str(self.args.batches),
            "algorithm": self.described,
            "learning_rate": self.args.learning_rate,
            "generation": self._buffered_inputs if self._step % every else None,
            "step": self._step,
            "position": self._stream.position if self._stream is not None else None,
            "health": self._nonfinite.state,
            "metrics": dict(self._metrics["train"]),
        }

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        own = [dict(group) for group in self.optimizer.param_groups] if checkpoint else []
        super()._load_optimizer_and_scheduler(checkpoint)
        rank, device = self.accelerator.process_index, self.accelerator.device
        made = str(self.args.batches), self.described
        state = checkpoints.load_state(checkpoint, rank, *made, device) if checkpoint else None
        if state is None:
            return
        checkpoints.use_own_settings(self, own, state)
        self._metrics["train"].update(state["metrics"])
        self._nonfinite.state = state["health"]
        self._step, self._buffered_inputs = state["step"], state["generation"]
        if self._stream is not None and state["position"] is not None:
            self._stream.position = state["position"]
        for _ in range(state["epochs"] if self.shuffle_dataset else 0):
            torch.randperm(self._sampler.num_samples, generator=self._sampler.generator)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with checkpoints.sealed(self, self._own_state()):
            super()._save_checkpoint(*args, **kwargs)
