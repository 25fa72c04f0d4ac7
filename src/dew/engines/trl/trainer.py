"""DewTrainer: TRL's GRPOTrainer with an algorithm of dew. It calls TRL's methods and works on what they return.

train                            resume from a checkpoint, explain what ended the run
_generate_and_score_completions  one generation:
    sample                         TRL generates and scores; dew adds the entropy of the sampling policy
    give_credit                    the algorithm's advantages, once, on whole groups
    generation_metrics, ...        metrics, TRL's table of completions, token records
_compute_loss                    the algorithm's loss, per micro-batch
_get_grad_norm                   skip the step if something is not finite
_save_checkpoint                 TRL's, then dew's state and a manifest
"""

import logging
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from trl import GRPOTrainer

from dew.engines.credit import give_credit
from dew.engines.recorder import due
from dew.engines.trl import metrics
from dew.engines.trl.batch import Batch, Capture, Scores, gather_rows, make_batch, own_mask
from dew.engines.trl.compat import IMAGE_KEYS, check_generated, check_not_unsloth
from dew.engines.trl.config import DewConfig
from dew.engines.trl.guide import Guide, add_authors, generate_with_guide, guide_of
from dew.engines.trl.loss import exact_head, head_with_sum_sq, loss_inputs, micro_batches, uses_exact_head
from dew.engines.trl.nonfinite import ADVANTAGES, describe
from dew.engines.trl.padding import aligned_passes, update_parts
from dew.engines.trl.recorded import RecordedTrainer, own_config
from dew.engines.trl.rewards import checked, missing_columns, outcome_index, warn_early
from dew.engines.trl.rollout import CapturedSampling, PromptStream, dropout_off, fill_batch, without_empty
from dew.errors import ConfigError, RewardError
from dew.rewards.calls import reward_name

logger = logging.getLogger("dew")


class DewTrainer(RecordedTrainer, GRPOTrainer):  # type: ignore[misc]
    """TRL's GRPOTrainer with an algorithm of dew: `DewTrainer(model, reward_funcs, DewConfig(...), train_dataset)`.

    Takes the arguments of GRPOTrainer. `args` is a `DewConfig`, which names the algorithm; `guide` is a second policy
    that writes some of the answers (docs/trl.md).
    """

    _tag_names: ClassVar = [*GRPOTrainer._tag_names, "dew"]
    num_generations: int
    rollout_func: Any

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: DewConfig | None = None,
        train_dataset: Any = None,
        *others: Any,
        guide: Guide | None = None,
        **settings: Any,
    ) -> None:
        check_not_unsloth()
        args = own_config(args, DewConfig, model)
        if guide is not None and (problems := args.guide_problems()):
            raise ConfigError(problems)
        several = isinstance(reward_funcs, list | tuple)
        rewards = list(reward_funcs) if several else [] if reward_funcs is None else [reward_funcs]
        self.algorithm = args.build_algorithm()
        if not settings.get("environment_factory"):  # else the environment may bring columns and the reward
            columns = None if settings.get("rollout_func") else getattr(train_dataset, "column_names", None)
            if isinstance(columns, list) and (missing := missing_columns(columns, rewards)):
                raise ConfigError(missing)
            outcome_index([reward_name(reward) for reward in rewards], args)
        args.batches.check_rows(train_dataset)
        self._name = self.algorithm.name
        if self.algorithm.paper is not None:
            self._paper = dict(self.algorithm.paper)
        limited = [checked(reward, args.reward_timeout) for reward in rewards]
        super().__init__(model, limited, args, train_dataset, *others, **settings)
        if self.rollout_func is not None:
            self.rollout_func = without_empty(self.rollout_func, self.eos_token_ids[0])
        self.outcome_index = outcome_index(self.reward_func_names, args)
        if hasattr(self, "generation_config"):  # a policy with NaN logits samples noise, and the step is skipped
            self.generation_config.remove_invalid_values = True

        self._capture = Capture()
        self._captured_sampling = CapturedSampling(self)
        self._exact_head = uses_exact_head(args.exact_head, self.model, self.algorithm)
        self._aligned = args.less_padding and not (
            self.sharded or self.aux_loss_enabled or self._is_vlm or self.algorithm.engine_loss
        )
        self._stream: PromptStream | None = None
        if self.algorithm.dynamic_sampling:
            self._stream = PromptStream(self.train_dataset, args.seed, bool(self.shuffle_dataset))
            metrics.extend_table(self._logs)
        self._guide = guide_of(self, guide, train_dataset)
        if self.accelerator.is_main_process:
            warn_early(args, rewards, train_dataset, self.outcome_index)
        self._waiting: list[dict[str, Any]] = []
        self._statistics = metrics.StepStatistics()

    # ── start ───────────────────────────────────────────────────────────────────────────────────────────────

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._waiting, self._statistics = [], metrics.StepStatistics()  # without those of an interrupted step
        try:
            return super().train(*args, **kwargs)
        except RewardError:
            self._save_before_failure()
            raise

    def _save_before_failure(self) -> None:
        """When a reward fails between two steps, save the first. Several processes would have to fail together."""
        step = self.state.global_step
        between_steps = self._step % self.args.gradient_accumulation_steps == 0
        saved = (Path(self.args.output_dir) / f"checkpoint-{step}").exists()
        if not step or not between_steps or saved or self.accelerator.num_processes > 1:
            return
        with suppress(Exception):  # the reward's own error is the one to report
            self._save_checkpoint(self.model, None)
            logger.warning("Saved checkpoint-%d before the reward failed.", step)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        self._sampler = super()._get_train_sampler(*args, **kwargs)
        return self._sampler

    def _restore(self, state: dict[str, Any]) -> None:
        super()._restore(state)
        self._step = state["step"]
        self._buffered_inputs = state["generation"]
        if self._stream is not None and state["position"] is not None:
            self._stream.position = state["position"]
        for _ in range(state["epochs"] if self.shuffle_dataset else 0):
            torch.randperm(self._sampler.num_samples, generator=self._sampler.generator)

    # ── a generation: sample, score, credit, report ─────────────────────────────────────────────────────────

    @property
    def group_size(self) -> int:
        return self.num_generations if self.model.training else self.num_generations_eval

    @property
    def _record_due(self) -> bool:
        steps = self.args.steps_per_generation * self.num_iterations / self.args.gradient_accumulation_steps
        return self.model.training and due(self.state.global_step + 1, self.args.records_every, steps)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self._stream is not None and self.model.training:
            batch = self._sample_until_full(self._stream)
        else:
            batch = self.sample(inputs)
        with self._recorder.phase("credit"):
            credit = give_credit(self.algorithm, batch, for_records=self._record_due)
            if self.algorithm.engine_loss:
                trl_advantages = gather_rows(self.accelerator, batch.inputs["advantages"])[:, None]
                credit = replace(credit, advantages=torch.where(batch.mask, trl_advantages, 0), flipped=None)
            if self.model.training:
                trains = batch.filler.all() | ~batch.filler  # fillers count if nothing else is left: weights may be NaN
                fine = (batch.nonfinite != 0) | credit.advantages.isfinite().all(-1)
                places = torch.where(fine, batch.nonfinite, ADVANTAGES) * trains
                self._nonfinite.generation = describe(places, self.reward_func_names, batch.table)
            trained = loss_inputs(self.algorithm, batch, credit, self.accelerator, self.args)
        size, seconds, threshold = self.group_size, self._recorder.seconds["generation"], self.algorithm.threshold
        self._put(metrics.generation_metrics(batch, credit, size, self.reward_func_names, threshold, seconds))
        if self.model.training:
            self._recorder.check_rewards(self.state.global_step + 1, self.algorithm, batch.answers["outcome"])
        else:
            self._put(metrics.pass_at(credit, size))
        metrics.show_trained(self._logs, batch, credit, self.args.generation_batch_size)
        if self._record_due:
            self._recorder.record(batch, credit, self)
        return trained

    def _sample_until_full(self, stream: PromptStream) -> Batch:
        """Dynamic sampling: the prompts come from the stream instead of TRL's data loader."""
        size, pad, accelerator = self.num_generations, self._tokenizer.pad_token_id, self.accelerator

        def sample(prompts: list[int]) -> Batch:
            rows = [self.train_dataset[i] for i in prompts for _ in range(size)]
            count = len(rows) // accelerator.num_processes
            return self.sample([dict(row) for row in rows[accelerator.process_index * count :][:count]])

        fills = {"prompt_ids": pad, "completion_ids": pad, "tool_mask": 1, "importance_sampling_ratio": 1}
        quota, guided = self.args.generation_batch_size // size, self._guide is not None
        return fill_batch(
            sample, self.algorithm, stream, accelerator, quota=quota, size=size, whole_groups=guided, fills=fills
        )

    def sample(self, rows: list[dict[str, Any]]) -> Batch:
        """Generate and score one answer to each row of the data set; a prompt has as many rows as its group.

        Nothing is trained. The mode of the model decides between the settings of training and of evaluation.
        """
        rewards = self._metrics[self._mode]["reward"]
        before = len(rewards)
        capture = self._capture = Capture()
        with self._recorder.phase("scoring"):
            inputs = super()._generate_and_score_completions(rows)
            del rewards[before:]  # dew reports its own, without the guide's answers
            if self._guide is not None and self.model.training:
                add_authors(inputs, capture.authors)
            old = self._old_policy(inputs)
        if (sampler := inputs.get("sampling_per_token_logps")) is not None and old.logp is not None:
            self._put(metrics.sampler_metrics(old.logp, sampler, own_mask(inputs), self.accelerator))
        recorded = rows if self._record_due else None
        return make_batch(self, inputs, capture, old, metrics.last_rows(self._logs, len(capture.parts)), recorded)

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        capture = self._capture
        with self._recorder.phase("generation"), dropout_off(self.model):
            if self._guide is None or not self.model.training:
                generated, capture.authors = super()._generate(prompts), [None] * len(prompts)
            else:
                generated, capture.authors = generate_with_guide(self, self._guide, prompts, self._generate_ragged)
        check_generated(generated)
        capture.completion_ids, capture.tool_mask = generated[1], generated[2]
        return generated

    def _generate_ragged(self, prompts: list[Any]) -> tuple[Any, ...]:
        """For groups of unequal size: vLLM would take every `num_generations` prompts for one group."""
        size, self.num_generations = self.num_generations, 1
        try:
            return super()._generate(prompts)
        finally:
            self.num_generations = size

    def sampling_model(self) -> Any:
        """The current weights, in the precision that they are sampled in."""
        return self._captured_sampling.current_model()

    def _generate_single_turn(self, prompt_ids: list[list[int]], images: Any = None, *args: Any, **kwargs: Any) -> Any:
        sampled = self._captured_sampling.generate(prompt_ids) if images is None else None
        if sampled is not None:
            self._capture.sampled.append(sampled)
            return sampled[0], None
        return super()._generate_single_turn(prompt_ids, images, *args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._recorder.phase("reward"):
            found: Tensor = super()._calculate_rewards(*args, **kwargs)
        # NaN stands for a function's None ("does not apply"), but a reward model has no None.
        models = torch.tensor([isinstance(f, torch.nn.Module) for f in self.reward_funcs], device=found.device)
        self._capture.invalid = found.isinf() | (found.isnan() & models)
        self._capture.parts = found.masked_fill(self._capture.invalid, torch.nan)
        return self._capture.parts

    def _get_per_token_logps_and_entropies(
        self, model: Any, ids: Tensor, mask: Tensor, keep: int, batch_size: int | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, Any]:
        """The one place where the head is computed: (B, T) log-probabilities and entropies, and the router's loss."""
        scores, longest = not torch.is_grad_enabled(), kwargs.pop("longest", None)
        own = scores and model is self.model
        sum_sq = own and self.algorithm.needs_sum_sq
        if own:
            kwargs["compute_entropy"] = True  # the head computes it anyway; TRL discards it
        squares: list[Tensor] = []
        head: Any = exact_head(self._entropy_bonus_enabled and not scores) if self._exact_head else nullcontext()
        if sum_sq:
            head = head_with_sum_sq(squares, model, keep)
        with head, dropout_off(model) if scores else nullcontext():
            if self._aligned and not sum_sq:
                with self.accelerator.autocast():
                    logp, entropy = aligned_passes(model, ids, mask, keep, batch_size, longest)
                aux = None
            else:
                inner = super()._get_per_token_logps_and_entropies
                logp, entropy, aux = inner(model, ids, mask, keep, batch_size=batch_size, **kwargs)
        if scores:
            self._capture.passes.append(Scores(logp, entropy, torch.cat(squares) if squares else None))
        self._capture.newest = (logp.detach(), entropy if entropy is None else entropy.detach())
        return logp, entropy, aux

    def _forward(self, model: Any, inputs: Mapping[str, Any], **kwargs: Any) -> tuple[Tensor, Tensor, Any]:
        """Log-probabilities and entropies of the completions, and the router's loss."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        kwargs |= {key: inputs[key] for key in (*IMAGE_KEYS, "longest") if inputs.get(key) is not None}
        logp, entropy, aux = self._get_per_token_logps_and_entropies(
            model, ids, mask, inputs["completion_ids"].size(1), compute_entropy=True, **kwargs
        )
        assert entropy is not None
        return logp, entropy, aux

    def _old_policy(self, inputs: dict[str, Any]) -> Scores:
        """What credit reads of the sampling policy: from TRL's pass, the sampler, or our pass."""
        args, algorithm = self.args, self.algorithm
        for scored in self._capture.passes:
            if scored.logp is inputs.get("old_per_token_logps"):
                return scored
        if not (algorithm.signals or self._record_due):
            return Scores()
        if not algorithm.needs_sum_sq and (sampled := self._captured_sampling.scores(inputs, self._capture)):
            return Scores(*sampled)
        rows = args.per_device_train_batch_size if self.model.training else args.per_device_eval_batch_size
        with torch.no_grad():
            self._forward(self.model, inputs, batch_size=rows)
        return self._capture.passes[-1]

    # ── the update ──────────────────────────────────────────────────────────────────────────────────────────

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """The loss of a micro-batch. With aligned rows, the last one of an optimizer step trains the rows of all."""
        compute = self._trl_loss if self.algorithm.engine_loss else self._loss
        if not self.model.training:
            loss = compute(model, inputs)
            self._put(self._statistics.read(self.accelerator)[0])
            return loss
        if self.algorithm.engine_loss or not self._aligned:
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
        # `divisor` is that of the generation; an optimizer step takes its share of it, and DDP averages over processes.
        steps = self.current_gradient_accumulation_steps if self.model.training else 1
        share = steps / self.args.steps_per_generation if self.model.training else 1.0
        count = inputs["divisor"] * share / self.accelerator.num_processes
        loss = torch.zeros((), device=logp.device)
        for name, (part_logp, part) in micro_batches(inputs, logp, entropy, self.algorithm.clip_high).items():
            term, stats = self.algorithm.loss(part_logp, part, inputs["advantages"], count=count)
            loss = loss + term
            self._statistics.add({name + stat: value for stat, value in stats.items()}, part.mask.sum())
        self._statistics.add_update(loss, inputs, logp, entropy)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux / steps
        return loss

    def _trl_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """TRL's own loss, and the statistics of the step."""
        loss: Tensor = super()._compute_loss(model, inputs)
        logp, entropy = self._capture.newest
        assert entropy is not None
        ((_, part),) = micro_batches(inputs, logp, entropy, self.algorithm.clip_high).values()
        _, stats = self.algorithm.loss(logp, part, inputs["advantages"], count=1)
        logged = {"clip/low": "clip_ratio/low_mean", "clip/high": "clip_ratio/high_mean"}
        for ours, theirs in logged.items():  # TRL knows what its loss clips
            values = self._metrics[self._mode].get(theirs)
            if values:
                stats[ours] = torch.tensor(values[-1], device=logp.device)
            else:
                stats.pop(ours)
        self._statistics.add(stats, part.mask.sum())
        self._statistics.add_update(loss, inputs, logp, entropy)
        return loss

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            numbers, self._nonfinite.update = self._statistics.read(self.accelerator)
            self._put(numbers)
        return loss

    # ── checkpoints ─────────────────────────────────────────────────────────────────────────────────────────

    def _own_state(self) -> dict[str, Any]:
        """The current generation, and the positions in it and in the prompts."""
        every = self.args.steps_per_generation * self.num_iterations
        return {
            **super()._own_state(),
            "step": self._step,
            "generation": self._buffered_inputs if self._step % every else None,
            "position": self._stream.position if self._stream is not None else None,
        }
