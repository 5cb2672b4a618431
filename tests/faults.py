"""Mistakes that tests must detect. A line has file, text, its replacement, the test that must fail, and the meaning.

pytest tests/test_faults.py                   checks that each text below occurs exactly once in its file
pytest tests/test_faults.py -m exhaustive     makes each mistake in a copy of the course, where its test must fail
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """One mistake: a replacement in the source text, and the test that must fail with it."""

    module: str  # the file, such as "step02_ddp" or "common.comm"
    old: str  # text that occurs once in the file
    new: str  # the text that replaces it
    test: str  # "file::test", in tests/: the test that must fail
    meaning: str  # what goes wrong, and a link if others have reported this mistake


# fmt: off
FAULTS = [
    # --- chapter 1, and the files of common/ that it needs
    Fault("step01_single_gpu", "model(x, y) / n_targets", "model(x, y) / (n_targets / len(xs))", "test_step01::test_train", "gradients are multiplied by the number of micro-batches, which Adam alone would hide"),  # noqa: E501
    Fault("step01_single_gpu", "model(x, y) / n_targets", "model(x, y) / (y != IGNORE).sum().clamp(min=1)", "test_step01::test_train", "the means of micro-batches are added, so gradients are too large"),  # noqa: E501
    Fault("step01_single_gpu", "model(x, y) / n_targets", "model(x, y) / (y != IGNORE).sum().clamp(min=1) / len(xs)", "test_step01::test_train", "the means of micro-batches are averaged, whatever their numbers of targets: https://github.com/huggingface/transformers/issues/24725"),  # noqa: E501
    Fault("step01_single_gpu", "(targets != IGNORE).sum()", "torch.tensor(targets.numel())", "test_step01::test_train", "ignored targets are counted: https://github.com/pytorch/torchtitan/pull/2206"),  # noqa: E501
    Fault("step01_single_gpu", "loss = loss + micro_loss", "loss = micro_loss", "test_step01::test_train", "only the last micro-batch's loss is logged"),  # noqa: E501
    Fault("step01_single_gpu", "micro_loss.detach()", "micro_loss", "test_step01::test_a_norm_that_is_not_finite_ends_the_run_before_the_update", "the graph of every micro-batch is kept"),  # noqa: E501
    Fault("step01_single_gpu", "norm = torch.nn", "norm = 1.0 if step else torch.nn", "test_step01::test_train", "after the first step the norm is taken to be 1"),  # noqa: E501
    Fault("step01_single_gpu", "scale(optimizer.gradients(), clip_coef)", "pass", "test_step01::test_train", "nothing is clipped"),  # noqa: E501
    Fault("step01_single_gpu", "min(1.0, config.grad_clip / norm)", "config.grad_clip / norm", "test_step01::test_train", "small gradients are scaled up"),  # noqa: E501
    Fault("step01_single_gpu", "if config.grad_clip and norm else", "if norm else", "test_step01::test_train", "--grad-clip 0 sets all gradients to zero"),  # noqa: E501
    Fault("step01_single_gpu", "config.grad_clip and norm else", "config.grad_clip else", "test_step01::test_batches_without_targets_change_nothing", "clipping divides by a norm of 0"),  # noqa: E501
    Fault("step01_single_gpu", ".clamp(min=1)\n", "\n", "test_step01::test_batches_without_targets_change_nothing", "a batch without targets gives 0 / 0"),  # noqa: E501
    Fault("step01_single_gpu", "param.grad = self.masters[name].grad = None", "pass", "test_step01::test_optimizer", "gradients add up over steps"),  # noqa: E501
    Fault("step01_single_gpu", "weight_decay=0.0)", "weight_decay=config.weight_decay)", "test_step01::test_adamw_and_what_decays", "norms have weight decay"),  # noqa: E501
    Fault("step01_single_gpu", "(0.9, 0.95)", "(0.9, 0.999)", "test_step01::test_adamw_and_what_decays", "PyTorch's default betas are used"),  # noqa: E501
    Fault("step01_single_gpu", "config.lr * (step + 1)", "config.lr * step", "test_step01::test_learning_rate", "the first step has a learning rate of 0"),  # noqa: E501
    Fault("step01_single_gpu", "0.1 + 0.45 *", "0.5 *", "test_step01::test_learning_rate", "the cosine ends at zero instead of a tenth"),  # noqa: E501
    Fault("step01_single_gpu", "learning_rate(step, config)\n", "learning_rate(0, config)\n", "test_step01::test_train", "every step has the learning rate of the first"),  # noqa: E501
    Fault("step01_single_gpu", "learning_rate(step, config)\n", "learning_rate(2 * step, config)\n", "test_step01::test_train", "the learning-rate schedule runs too fast: https://github.com/huggingface/accelerate/issues/662"),  # noqa: E501
    Fault("step01_single_gpu", 'group["lr"] = lr', 'group.setdefault("lr", lr)', "test_step01::test_optimizer", "the optimizer keeps its own learning rate"),  # noqa: E501
    Fault("step01_single_gpu", " if param.requires_grad}", "}", "test_step01::test_optimizer", "a frozen parameter has a master"),  # noqa: E501
    Fault("step01_single_gpu", "param.grad_dtype = wide(param.dtype)", "param.main_grad = None", "test_step01::test_optimizer", "gradients accumulate in 16 bits"),  # noqa: E501
    Fault("step01_single_gpu", "= param.grad\n", "= param.grad.bfloat16().to(param.grad.dtype)\n", "test_step01::test_optimizer", "fp32 sums are rounded before the update"),  # noqa: E501
    Fault("step01_single_gpu", "param.detach().copy_(self.masters[name])", "self.masters[name].copy_(param.detach().copy_(self.masters[name]))", "test_step01::test_optimizer", "masters are rounded, so small updates vanish"),  # noqa: E501
    Fault("step01_single_gpu", "partial(checkpoint, layer.forward, use_reentrant=False)", "partial(lambda f, x, *t: checkpoint(lambda x: f(x * 1.01, *t), x, use_reentrant=False), layer.forward)", "test_step01::test_law_of_saved_numbers_and_flops", "a layer is recomputed from another input"),  # noqa: E501
    Fault("step01_single_gpu", "in model.model.layers.values():", 'in [model.model.layers["0"]]:', "test_step01::test_law_of_saved_numbers_and_flops", "only one layer is recomputed"),  # noqa: E501
    Fault("step01_single_gpu", "layer.forward = partial", "layer.other = partial", "test_step01::test_law_of_saved_numbers_and_flops", "nothing is recomputed"),  # noqa: E501
    Fault("step01_single_gpu", "set_up_layers(model, config)", "pass", "test_step01::test_a_norm_that_is_not_finite_ends_the_run_before_the_update", "--recompute is ignored"),  # noqa: E501
    Fault("common.model", "self.config, wide(x.dtype))", "self.config, x.dtype)", "test_step01::test_angles_are_fp32_in_a_bf16_run", "RoPE's angles are computed in bf16: https://github.com/huggingface/transformers/pull/29285"),  # noqa: E501
    Fault("common.model", "return angle.cos()", "return angle.cos().bfloat16().to(dtype)", "test_step01::test_angles_are_fp32_in_a_bf16_run", "RoPE's tables are rounded to bf16"),  # noqa: E501
    Fault("common.model", "(-second, first)", "(second, -first)", "test_step01::test_angles_are_fp32_in_a_bf16_run", "RoPE rotates in the opposite direction"),  # noqa: E501
    Fault("common.model", "x.chunk(2, dim=-1)", "(x[..., ::2], x[..., 1::2])", "test_step01::test_angles_are_fp32_in_a_bf16_run", "RoPE rotates the pairs (2i, 2i+1), as in its paper"),  # noqa: E501
    Fault("common.model", "- 1) / 3)", "- 1) / 4)", "test_step01::test_the_model_is_llama", "the ramp of Llama 3's RoPE goes from 8192 to 1638 tokens"),  # noqa: E501
    Fault("common.model", "(keep + (1 - keep) / config", "(1 - keep + keep / config", "test_step01::test_the_model_is_llama", "short wave lengths are stretched instead of long ones"),  # noqa: E501
    Fault("common.model", "cos, sin), v)", "cos, sin), apply_rope(v, cos, sin))", "test_step01::test_the_model_is_llama", "values are rotated, too"),  # noqa: E501
    Fault("common.model", "is_causal=True", "is_causal=False", "test_step01::test_the_model_is_llama", "a token sees the token that it must predict"),  # noqa: E501
    Fault("common.model", "q, k, v = (x.transpose", "k, v = (x.repeat(1, 1, q.shape[2] // k.shape[2], 1) for x in (k, v))\n    q, k, v = (x.transpose", "test_step01::test_the_model_is_llama", "query head i uses key head i mod kv_heads"),  # noqa: E501
    Fault("common.model", "F.silu(self.gate_proj(x)) * self.up_proj(x)", "self.gate_proj(x) * F.silu(self.up_proj(x))", "test_step01::test_the_model_is_llama", "gate and up are exchanged"),  # noqa: E501
    Fault("common.model", "self.self_attn(self.input_layernorm(x), cos, sin)", "self.input_layernorm(self.self_attn(x, cos, sin))", "test_step01::test_the_model_is_llama", "the norm comes after the block"),  # noqa: E501
    Fault("common.model", "self.lm_head(self.model.norm(x))", "self.lm_head(x)", "test_step01::test_the_model_is_llama", "the last norm is left out"),  # noqa: E501
    Fault("common.model", '"sum"', '"mean"', "test_step01::test_cross_entropy_of_bf16", "the loss is divided by the number of targets twice"),  # noqa: E501
    Fault("common.model", "targets.flatten(), ignore_index=IGNORE", "targets.flatten().clamp(min=0)", "test_step01::test_cross_entropy_of_bf16", "ignored targets count as token 0"),  # noqa: E501
    Fault("common.model", ".to(wide(logits.dtype))", "", "test_step01::test_cross_entropy_of_bf16", "the loss is computed in bf16"),  # noqa: E501
    Fault("common.data", "rows[:, 1:]", "rows[:, :-1]", "test_data::test_targets_are_the_next_tokens", "each token is its own target"),  # noqa: E501
    Fault("common.data", "range(step * self.batch_size, (step + 1) * self.batch_size)", "range(self.batch_size)", "test_data::test_each_epoch_has_every_window_once_in_another_order", "every step has the same batch"),  # noqa: E501
    Fault("common.data", "self.seed, epoch)[place]", "self.seed, 0)[place]", "test_data::test_each_epoch_has_every_window_once_in_another_order", "every epoch has the same order: https://github.com/lucidrains/DALLE-pytorch/pull/230"),  # noqa: E501
    Fault("common.data", "default_rng((seed, epoch))", "default_rng(epoch)", "test_data::test_each_epoch_has_every_window_once_in_another_order", "the order does not depend on the seed"),  # noqa: E501
    Fault("common.data", "self.n_windows - max(1, self.n_windows // 20)", "self.n_windows", "test_data::test_each_epoch_has_every_window_once_in_another_order", "the held-out windows are trained on"),  # noqa: E501
    Fault("common.data", "default_rng(0)", 'default_rng(int(os.environ.get("RANK", 0)))', "test_step01::test_a_plain_launch", "each rank shuffles the files in its own order: https://github.com/jzhang38/TinyLlama/issues/67"),  # noqa: E501
    Fault("common.data", "if suffix or not HUB_NAME", "if not HUB_NAME", "test_data::test_a_missing_file_is_not_looked_up_on_the_hub", "a mistyped file is looked up on the hub"),  # noqa: E501
    Fault("common.data", "if len(examples) != 1 or None in examples:", "if not examples:", "test_data::test_a_folder_of_several_kinds_is_refused", "a folder is read in part"),  # noqa: E501
    Fault("common.data", "if not isinstance(text, str):", "if text is None:", "test_data::test_a_parquet_file_without_texts_is_named", "a row without a text is an error of the program"),  # noqa: E501
    Fault("common.data", "if not n_characters:", "if row < 0:", "test_data::test_an_unusable_file_is_named", "an empty file is read"),  # noqa: E501
    Fault("common.data", 'known["dtype"], "r")', '"uint16", "r")', "test_data::test_token_ids_are_mapped_into_memory", "32-bit ids are read as 16-bit ones"),  # noqa: E501
    Fault("common.data", "if len(tokens) != known", "if not tokens.size and known", "test_data::test_token_ids_that_do_not_fit_are_refused", "a part of the ids is taken as the whole"),  # noqa: E501
    Fault("common.data", "largest >= shape.vocab_size", "largest > shape.vocab_size", "test_data::test_text_needs_a_vocabulary_with_its_end", "an id just outside the vocabulary is not noticed"),  # noqa: E501
    Fault("common.data", "range(self.n_train, min", "range(0, min", "test_data::test_held_out_windows_are_the_last_twentieth", "the held-out windows are those that are trained on"),  # noqa: E501
    Fault("common.data", "part[:BLOCK]", "part[:1]", "test_data::test_a_changed_token_changes_the_fingerprint", "the fingerprint misses a changed token"),  # noqa: E501
    Fault("common.layout", "value = shard_of(value, shard)", "value = draw(name, list(param.shape), model.config.n_layers, seed)", "test_step01::test_materialize", "all ranks draw the same shard: https://github.com/modelscope/ms-swift/pull/7944"),  # noqa: E501
    Fault("common.layout", "setattr(module, key, filled)", "setattr(module, key, nn.Parameter(filled.detach().clone()))", "test_step01::test_materialize", "the tie between embedding and head is cut: https://github.com/facebookresearch/lingua/pull/75"),  # noqa: E501
    Fault("common.layout", "shard.start : shard.stop]", ": shard.stop - shard.start]", "test_step01::test_materialize", "all ranks hold rank 0's shard"),  # noqa: E501
    Fault("common.layout", "model.config.n_layers, seed)", "model.config.n_layers, seed) * (1 + len(layout_of(param).shards)) ** 0.5", "test_step01::test_materialize", "initial values depend on the layout"),  # noqa: E501
    Fault("common.layout", "value = draw(name,", 'value = draw(name if "0" in model.model.layers else name.replace(".1.", ".0."),', "test_step01::test_materialize", "each stage counts its layers from 0"),  # noqa: E501
    Fault("common.layout", "model.config.n_layers, seed)", "len(model.model.layers), seed)", "test_step01::test_materialize", "initial values depend on the number of layers in a stage"),  # noqa: E501
    Fault("common.layout", "/ (2 * n_layers) ** 0.5", "/ n_layers**0.5", "test_step01::test_initial_values", "the matrices that write to the residual stream are too large"),  # noqa: E501
    Fault("common.layout", 'f"{seed}:{name}"', 'f"{name}"', "test_step01::test_initial_values", "all seeds give the same initial weights"),  # noqa: E501
    Fault("common.trainer", "if not math.isfinite(value)", "if math.isinf(value)", "test_step01::test_a_norm_that_is_not_finite_ends_the_run_before_the_update", "a gradient norm of nan is accepted"),  # noqa: E501
    Fault("common.trainer", ">= (8, 0)", ">= (7, 0)", "test_step01::test_choose_device", "bf16 is chosen on GPUs that emulate it"),  # noqa: E501
    Fault("common.trainer", '"metrics.jsonl").write_text(', '"metrics.jsonl").open("a").write(', "test_step01::test_a_plain_launch", "the metrics of an earlier run stay"),  # noqa: E501
    Fault("common.trainer", "if stopping or self.save_is_due(", "if self.save_is_due(", "test_trainer::test_a_signal_to_one_rank_ends_all_after_the_same_step", "a signal ends the run without a checkpoint"),  # noqa: E501
    Fault("common.trainer", "any(self.ranks.gather(signals.received > 0))", "signals.received > 0", "test_trainer::test_a_signal_to_one_rank_ends_all_after_the_same_step", "only the rank that got the signal stops"),  # noqa: E501
    Fault("common.trainer", "self.save(step + 1)", "self.save(step)", "test_step07::test_resumed_is_uninterrupted", "a checkpoint has the number of the previous step"),  # noqa: E501
    Fault("common.trainer", '"o" if len(history) == 1 else ""', '""', "test_trainer::test_a_picture_of_one_step_has_a_point", "the picture of one step is empty"),  # noqa: E501
    Fault("common.trainer", "row[name] = None", "pass", "test_trainer::test_metrics_are_json", "metrics.jsonl has NaN, which is no JSON"),  # noqa: E501
    Fault("common.trainer", 'data.fingerprint() if data else ""', '""', "test_trainer::test_ranks_with_other_data_are_named", "ranks train on different data"),  # noqa: E501
    Fault("common.trainer", "self.ranks.world < self.world", "False", "test_trainer::test_step_1_on_two_ranks_is_refused", "two processes write one directory"),  # noqa: E501
    Fault("common.flags", "math.isfinite(value) and ", "", "test_flags::test_a_wrong_flag_is_named", "a flag accepts inf"),  # noqa: E501
    Fault("common.flags", "allow_abbrev=False", "allow_abbrev=True", "test_flags::test_a_wrong_flag_is_named", "a flag that does not exist is taken as the abbreviation of another"),  # noqa: E501
    Fault("common.flags", "value is None or value in values", "True", "test_flags::test_a_wrong_flag_is_named", "a flag without effect is accepted"),  # noqa: E501
    Fault("common.checkpoint", "        optimizer.publish()\n", "", "test_step07::test_resumed_is_uninterrupted", "masters are restored, but weights are not"),  # noqa: E501
    Fault("common.checkpoint", "optimizer.torch_optimizer.state[master] = tensors", "pass", "test_step07::test_resumed_is_uninterrupted", "the optimizer's moments are not restored"),  # noqa: E501
    Fault("common.checkpoint", "in reversed(layout_of(param).shards)", "in layout_of(param).shards", "test_checkpoint::test_box_is_where_shard_of_takes_elements_from", "a dimension that is sharded twice is restored from wrong places"),  # noqa: E501
    Fault("common.checkpoint", "min(stop + shard.start, shard.full)", "stop + shard.start", "test_checkpoint::test_box_is_where_shard_of_takes_elements_from", "padding is restored as if it were weights"),  # noqa: E501
    Fault("common.checkpoint", "if name in persistent:", "if False:", "test_checkpoint::test_whole_parameters_of_several_ranks", "buffers are not saved"),  # noqa: E501
    Fault("common.checkpoint", "in files[rank:] + files[:rank]", "in files", "test_checkpoint::test_a_rank_finds_its_own_piece_first", "all ranks restore rank 0's copy of weights that differ"),  # noqa: E501
    Fault("common.checkpoint", "if broken or (", "if (", "test_checkpoint::test_one_altered_byte_of_a_tensor_is_noticed", "altered weights are restored"),  # noqa: E501
    Fault("common.checkpoint", "!= (number, len(paths))", "== ()", "test_checkpoint::test_a_damaged_checkpoint_is_skipped", "a missing file is not noticed"),  # noqa: E501
    Fault("common.checkpoint", "<= folder][:2]", "<= folder][:1]", "test_checkpoint::test_the_last_two_checkpoints_stay", "only one checkpoint is kept"),  # noqa: E501
    Fault("common.checkpoint", 're.fullmatch(r"step-\\d{8}", path.name)', "path.is_dir()", "test_checkpoint::test_a_users_copy_is_no_checkpoint_of_the_run", "a user's copy is resumed, and deleted"),  # noqa: E501
    Fault("common.checkpoint", 'rank:05d}.pt").exists()', 'rank:05d}.pt").name', "test_checkpoint::test_without_a_shared_disk_no_checkpoint_gets_a_name", "checkpoints lack the files of other nodes"),  # noqa: E501
    Fault("common.checkpoint", "raise error.__context__ or error from None", "raise", "test_checkpoint::test_the_error_that_follows_a_full_disk_is_not_shown", "a full disk ends in a traceback"),  # noqa: E501
    Fault("common.resume", "before != value and name not in free", "False", "test_checkpoint::test_a_resumed_run_computes_the_same", "a resumed run computes something else"),  # noqa: E501
    Fault("common.resume", 'free = free - {"micro_batch_size"}', "pass", "test_checkpoint::test_a_resumed_run_computes_the_same", "experts are balanced within other micro-batches"),  # noqa: E501
    Fault("common.resume", 'if own and resume != "auto":', "if False:", "test_checkpoint::test_runs_do_not_mix", "a fresh run mixes its checkpoints with another's"),  # noqa: E501
    Fault("common.ranks", "problem = max(self.gather(problem))", "self.gather(problem)", "test_checkpoint::test_an_error_of_one_rank_is_that_of_all", "one rank ends, and the others wait for it"),  # noqa: E501
    Fault("common.ranks", "if not present and ", "if False and ", "test_trainer::test_processes_that_would_not_find_one_another_are_refused", "srun starts the same run several times"),  # noqa: E501
    Fault("common.watch", "0 < self.received < now - 1", "self.received", "test_trainer::test_a_second_ctrl_c_ends_the_process", "the signal that torchrun repeats ends the run without a checkpoint"),  # noqa: E501
    Fault("common.meter", "PEAKS.get(name, (0, 0))", "next((peak for gpu, peak in PEAKS.items() if gpu in str(name)), (0, 0))", "test_trainer::test_peaks_are_those_of_exact_names", "a slice of a GPU counts as a whole one"),  # noqa: E501
    Fault("common.meter", '("embed_tokens" not in name or shape.tied)', "True", "test_trainer::test_flops_are_those_that_torch_counts", "looking up an embedding counts as a matrix product"),  # noqa: E501
    Fault("common.compare", "if max(loss, norm) > bound", "if loss > 2 * bound", "test_trainer::test_compare_names_the_first_step_that_differs", "a difference is not reported"),  # noqa: E501
    # --- chapter 2, and common/comm.py
    Fault("step02_ddp", 'missing = n_micro_batches * len(', 'missing = (n_micro_batches - 1) * len(', "test_step02::test_bucket_sync_sums", "the last micro-batch's gradient is added after the sum: https://github.com/deepspeedai/DeepSpeed/pull/7985"),  # noqa: E501
    Fault("step02_ddp", "self.sum_up(param.grad, group)", "self.sum_up(param.data.div_(group.size), group)", "test_step02::test_naive_sync_sums_each_gradient_over_the_group_of_its_record", "weights are averaged, and gradients are not summed"),  # noqa: E501
    Fault("step02_ddp", "dist.all_reduce(gradient, group=group.handle)", "dist.all_reduce(gradient, group=group.handle), gradient.div_(group.size)", "test_step02::test_naive_sync_sums_each_gradient_over_the_group_of_its_record", "gradients are averaged, so they are scaled twice"),  # noqa: E501
    Fault("step02_ddp", "group=group.handle)", "group=group.handle, async_op=True)", "test_step02::test_naive_sync_sums_each_gradient_over_the_group_of_its_record", "the sum is never waited for"),  # noqa: E501
    Fault("step02_ddp", "self.mesh[layout_of(param).data_dim]", 'self.mesh["dp"]', "test_step02::test_naive_sync_sums_each_gradient_over_the_group_of_its_record", "all gradients are summed over dp, whatever their records say"),  # noqa: E501
    Fault("step02_ddp", "if group.size > 1:", "if True:", "test_step02::test_naive_sync_sums_each_gradient_over_the_group_of_its_record", "a group of one has no handle, so torch sums over all ranks"),  # noqa: E501
    Fault("step02_ddp", "range(2 * (n - 1))", "range(2 * (n - 1) - 1)", "test_step02::test_ring_sum", "one round is missing, so a shard keeps an old sum"),  # noqa: E501
    Fault("step02_ddp", "range(2 * (n - 1))", "range(n - 1)", "test_step02::test_ring_sum", "complete shards are not passed on"),  # noqa: E501
    Fault("step02_ddp", "target.copy_(incoming)", "target += incoming", "test_step02::test_ring_sum", "complete shards are added once more"),  # noqa: E501
    Fault("step02_ddp", "target += incoming", "target.copy_(incoming)", "test_step02::test_ring_sum", "a received shard replaces this rank's shard instead of being added"),  # noqa: E501
    Fault("step02_ddp", "torch.empty_like(target)", "torch.zeros(target.shape)", "test_step02::test_ring_sum", "the receive buffer has another dtype"),  # noqa: E501
    Fault("step02_ddp", "        for s in range(2 * (n - 1)):", "        dist.all_reduce(gradient, group=group.handle)\n        for s in range(0):", "test_step02::test_ring_sum", "torch's all-reduce replaces the ring"),  # noqa: E501
    Fault("step02_ddp", "n, r = group.size, group.rank", "n, r = dist.get_world_size(), dist.get_rank()", "test_step02::test_ring_sum", "the ring runs through the whole world instead of the group"),  # noqa: E501
    Fault("step02_ddp", "dtype=params[0].grad_dtype", "dtype=params[0].dtype", "test_step02::test_bucket_has_one_buffer_and_views_of_it", "the buffer has the dtype of the parameters"),  # noqa: E501
    Fault("step02_ddp", "param.grad_dtype.itemsize", "param.itemsize", "test_step02::test_fill_buckets", "the limit counts the bytes of parameters instead of gradients"),  # noqa: E501
    Fault("step02_ddp", "size > room", "size >= room", "test_step02::test_fill_buckets", "a bucket may not be exactly full"),  # noqa: E501
    Fault("step02_ddp", " or group is not last_group", "", "test_step02::test_fill_buckets", "a bucket has parameters of two groups"),  # noqa: E501
    Fault("step02_ddp", "self.pending.append(all_reduce(bucket.flat, bucket.group))", "pass", "test_step02::test_bucket_sync_sums", "no bucket is summed"),  # noqa: E501
    Fault("step02_ddp", "self.pending.append(all_reduce(bucket.flat, bucket.group))", "bucket is self.buckets[-1] or self.pending.append(all_reduce(bucket.flat, bucket.group))", "test_step02::test_bucket_sync_sums", "the last bucket is not summed"),  # noqa: E501
    Fault("step02_ddp", "self.pending.append(", "all_reduce(bucket.flat, bucket.group).wait(), self.pending.append(", "test_step02::test_bucket_sync_sums", "each bucket is summed twice"),  # noqa: E501
    Fault("step02_ddp", "n_micro_batches * len(bucket.params)", "len(bucket.params)", "test_step02::test_bucket_sync_sums", "gradients of later micro-batches are not summed"),  # noqa: E501
    Fault("step02_ddp", "bucket.flat.zero_()", "pass", "test_step02::test_bucket_sync_sums", "the gradients of the previous step stay"),  # noqa: E501
    Fault("step02_ddp", "while self.unsent:  #", "while False:  #", "test_step02::test_bucket_sync_with_a_parameter_that_one_rank_alone_uses", "buckets behind one with an unused parameter are not summed"),  # noqa: E501
    Fault("step02_ddp", "param.register_post_accumulate_grad_hook(partial(self.mark_ready, bucket))", "pass", "test_step02::test_bucket_sync_sends_during_the_last_backward", "there is no hook, so every sum starts after backward"),  # noqa: E501
    Fault("step02_ddp", "partial(self.mark_ready, bucket)", "lambda p: self.mark_ready(bucket, p)", "test_step02::test_bucket_sync_sends_during_the_last_backward", "a lambda binds late, so all hooks mark the last bucket"),  # noqa: E501
    Fault("step02_ddp", "self.pending.append(all_reduce(bucket.flat, bucket.group))", "all_reduce(bucket.flat, bucket.group).wait()", "test_step02::test_bucket_sync_sends_during_the_last_backward", "backward waits for each sum"),  # noqa: E501
    Fault("step02_ddp", "        while self.unsent and self.unsent[0].missing == 0:\n            self.send(self.unsent.pop(0))", "        if bucket.missing == 0:\n            self.unsent.remove(bucket), self.send(bucket)", "test_step02::test_bucket_sync_with_a_parameter_that_one_rank_alone_uses", "ranks start their sums in different orders"),  # noqa: E501
    Fault("step02_ddp", "fill_buckets(backwards, mesh,", 'fill_buckets(backwards, dict.fromkeys(mesh.groups, mesh["dp"]),', "test_step02::test_bucket_sync_sums", "all gradients are summed over dp, whatever their records say"),  # noqa: E501
    Fault("step02_ddp", "        for pending in self.pending:\n            pending.wait()", "        self.pending[-1].wait()", "test_step02::test_bucket_sync_sums", "only the last sum is waited for: https://github.com/deepspeedai/DeepSpeed/issues/8061"),  # noqa: E501
    Fault("step02_ddp", "        for pending in self.pending:\n            pending.wait()", "", "test_step02::test_bucket_sync_sums", "gradients are used before they are summed: https://github.com/deepspeedai/DeepSpeed/issues/8061"),  # noqa: E501
    Fault("step02_ddp", "self.unsent, self.pending = list(self.buckets), []", "self.unsent, self.pending = list(self.buckets), getattr(self, 'pending', [])", "test_step02::test_bucket_sync_sums", "sums of earlier steps are kept"),  # noqa: E501
    Fault("step02_ddp", "(list(model.parameters())) if param.requires_grad]", "(list(model.parameters()))]", "test_step02::test_bucket_sync_sums", "a frozen parameter gets a hook"),  # noqa: E501
    Fault("step02_ddp", "sync.begin(len(xs))", "sync.begin(1)", "test_step02::test_flags_of_step_1_keep_their_meaning", "the sync is told that there is only one micro-batch: https://github.com/deepspeedai/DeepSpeed/pull/7985"),  # noqa: E501
    Fault("step02_ddp", "sync.begin(len(xs))", "sync.begin(len(xs)), optimizer.torch_optimizer.state.clear()", "test_step02::test_flags_of_step_1_keep_their_meaning", "every step has a new optimizer"),  # noqa: E501
    Fault("step02_ddp", "learning_rate(step, config)", "learning_rate(step * mesh.world, config)", "test_step02::test_flags_of_step_1_keep_their_meaning", "the learning-rate schedule runs faster with more ranks: https://github.com/huggingface/accelerate/issues/662"),  # noqa: E501
    Fault("step02_ddp", 'all_reduce(loss, mesh["dp"]).wait()', "pass", "test_step02::test_flags_of_step_1_keep_their_meaning", "the logged loss is that of one rank"),  # noqa: E501
    Fault("step02_ddp", "x[mine]", "x[: len(x[mine])]", "test_step02::test_flags_of_step_1_keep_their_meaning", "all ranks work on rank 0's share"),  # noqa: E501
    Fault("step02_ddp", "(targets != IGNORE).sum()", 'mesh["dp"].size * (targets[mine] != IGNORE).sum()', "test_step02::test_flags_of_step_1_keep_their_meaning", "each rank divides by its own number of targets: https://github.com/pytorch/torchtitan/pull/2206"),  # noqa: E501
    Fault("step02_ddp", 'all_reduce(loss, mesh["dp"])', 'all_reduce(loss.mul_(n_targets / (targets[mine] != IGNORE).sum() / mesh["dp"].size), mesh["dp"])', "test_step02::test_flags_of_step_1_keep_their_meaning", "the logged loss is an average of the ranks' means"),  # noqa: E501
    Fault("step02_ddp", "optimizer.zero_grad()", "pass", "test_step02::test_each_sync_trains_to_step_1s_numbers", "gradients add up over steps"),  # noqa: E501
    Fault("common.comm", "np.moveaxis(self.ranks, axes, range(-len(axes), 0))", "self.ranks", "test_step02::test_naive_sync_sums_each_gradient_over_the_group_of_its_record", "dp gets the groups of another dimension of the mesh"),  # noqa: E501
    Fault("common.comm", 'note("all_reduce", group, tensor, 2 * (group.size - 1)', 'note("all_reduce", group, tensor, (group.size - 1)', "test_step02::test_law_of_bytes", "only half of an all-reduce's bytes is counted"),  # noqa: E501
    Fault("common.comm", 'note("send", group, tensor, 1.0)', "pass", "test_step02::test_law_of_bytes", "messages are not counted"),  # noqa: E501
    Fault("common.comm", "row.index(self.rank)", "self.rank % len(row)", "test_step02::test_ring_sum", "a rank's number in the world is taken as its number in the group"),  # noqa: E501
    Fault("common.comm", "self.rank * length, (self.rank + 1) * length", "0, length", "test_step02::test_flags_of_step_1_keep_their_meaning", "all ranks work on rank 0's share"),  # noqa: E501
    Fault("common.comm", "            for work in self.works:\n                work.wait()", "            pass", "test_step02::test_bucket_sync_sums", "`wait` does not wait: https://github.com/deepspeedai/DeepSpeed/issues/8061"),  # noqa: E501
    # --- chapter 3
    Fault("step03_zero", "-(-ends[-1] // group.size)", "ends[-1] // group.size", "test_step03::test_unit", "the last elements are in no shard"),  # noqa: E501
    Fault("step03_zero", "self.first, 0), self.length)", "self.first, 0), self.length - 1)", "test_step03::test_unit", "the last element of a shard is left out"),  # noqa: E501
    Fault("step03_zero", "at - self.first", "at", "test_step03::test_unit", "a parameter's part of a shard is looked up at its place in the unit"),  # noqa: E501
    Fault("step03_zero", "return shard[start:stop]", "return shard[start:stop].clone()", "test_step03::test_unit", "a part is a copy, so clipping and updates are lost"),  # noqa: E501
    Fault("step03_zero", "self.master = self.shard.to(wide(reference_param.dtype))", "self.master = self.shard", "test_step03::test_unit", "masters have 16 bits: https://github.com/pytorch/pytorch/issues/106395"),  # noqa: E501
    Fault("step03_zero", "param.grad_dtype = wide(param.dtype)", "param.grad_dtype = param.dtype", "test_step03::test_unit", "gradients accumulate in 16 bits: https://github.com/pytorch/pytorch/issues/106395"),  # noqa: E501
    Fault("step03_zero", "dtype=wide(self.flat.dtype))", "dtype=self.flat.dtype)", "test_step03::test_gradients", "gradients are summed over ranks in 16 bits: https://github.com/pytorch/pytorch/issues/106395"),  # noqa: E501
    Fault("step03_zero", "layers\\.\\d+", "layers\\.\\d", "test_step03::test_unit_names", "layers 1 and 10 are one unit"),  # noqa: E501
    Fault("step03_zero", "(module, layout_of(param).data_dim)", '(module, "")', "test_step03::test_unit_names", "a unit has parameters of two groups"),  # noqa: E501
    Fault("step03_zero", "        return reduce_scatter(unit.reduced_shard, unit.gradient, unit.group)", "        all_reduce(unit.gradient, unit.group).wait()\n        unit.reduced_shard.copy_(unit.gradient[unit.first : unit.first + unit.length])\n        return Pending()", "test_step03::test_table", "the numbers are right, but twice the bytes are sent"),  # noqa: E501
    Fault("step03_zero", "        return reduce_scatter(unit.reduced_shard, unit.gradient, unit.group)", "        unit.reduced_shard.copy_(unit.gradient[unit.first : unit.first + unit.length])\n        return Pending()", "test_step03::test_gradients", "each rank keeps its own gradient instead of the sum"),  # noqa: E501
    Fault("step03_zero", "unit.gradient = unit.reduced_shard = unit.grad_shard = None", "pass", "test_step03::test_gradients", "gradients stay after the update"),  # noqa: E501
    Fault("step03_zero", "            for param in unit.trained.values():\n                param.grad = None", "", "test_step03::test_gradients", "a parameter's .grad stays after the update"),  # noqa: E501
    Fault("step03_zero", 'group["lr"] = lr', 'group.setdefault("lr", lr)', "test_step03::test_update", "the optimizer keeps its own learning rate"),  # noqa: E501
    Fault("step03_zero", "self.torch_optimizer.step()", "self.torch_optimizer.step(), self.torch_optimizer.state.clear()", "test_step03::test_update", "the optimizer's moments are lost after each step"),  # noqa: E501
    Fault("step03_zero", "unit.shard.copy_(unit.master)\n            pendings", "pass\n            pendings", "test_step03::test_update", "bf16 weights never change"),  # noqa: E501
    Fault("step03_zero", "self.publish()", "pass", "test_step03::test_update", "the other ranks' shards are not updated"),  # noqa: E501
    Fault("step03_zero", "        for pending in pendings:\n            pending.wait()", "        self.arriving = pendings", "test_step03::test_update", "weights are used before they have arrived: https://github.com/deepspeedai/DeepSpeed/issues/8061"),  # noqa: E501
    Fault("step03_zero", "            unit.missing = len(unit.trained)\n            unit.grad_shard", "            unit.missing = len(unit.named)\n            unit.grad_shard", "test_step03::test_gradients", "a unit waits for the gradients of frozen parameters"),  # noqa: E501
    Fault("step03_zero", "torch.zeros_like(unit.master", "torch.ones_like(unit.master", "test_step03::test_gradients", "the accumulated gradient starts at one"),  # noqa: E501
    Fault("step03_zero", "if self.in_flight is not None and self.in_flight[0] is unit:", "if False:", "test_step03::test_gradients", "a buffer is written to while its sum is in flight"),  # noqa: E501
    Fault("step03_zero", "        param.grad = None\n        unit.missing -= 1", "        unit.missing -= 1", "test_step03::test_gradients", "what was summed is summed again with the next micro-batch"),  # noqa: E501
    Fault("step03_zero", "        self.in_flight = unit, self.reduce(unit)", "        self.in_flight = unit, self.reduce(unit)\n        self.land()", "test_step03::test_when", "each sum is waited for at once, so nothing hides it"),  # noqa: E501
    Fault("step03_zero", "            pending.wait()\n            unit.grad_shard +=", "            unit.grad_shard +=", "test_step03::test_gradients", "a sum is used before it has arrived: https://github.com/deepspeedai/DeepSpeed/issues/8061"),  # noqa: E501
    Fault("step03_zero", "unit.grad_shard += unit.reduced_shard", "unit.grad_shard = unit.reduced_shard", "test_step03::test_gradients", "only the last micro-batch counts"),  # noqa: E501
    Fault("step03_zero", "unit.grad_shard += unit.reduced_shard", "unit.grad_shard = unit.reduced_shard + (unit.grad_shard if unit.group.size > 1 else 0)", "test_step03::test_gradients", "in a group of one, a sum replaces the accumulated gradient instead of being added: https://github.com/ServiceNow/Fast-LLM/pull/551"),  # noqa: E501
    Fault("step03_zero", 'finish the last unit."""\n        self.land()', 'finish the last unit."""', "test_step03::test_gradients", "the embedding's last sum is left out"),  # noqa: E501
    Fault("step03_zero", "self.shard, self.group), True", "self.shard * 0, self.group), True", "test_step03::test_gather_and_free", "zeros are gathered instead of weights"),  # noqa: E501
    Fault("step03_zero", "if not self.gathered:", "if self.gathering.wait() is None:", "test_step03::test_gather_and_free", "a unit that is already gathered is gathered again"),  # noqa: E501
    Fault("step03_zero", "self.flat.untyped_storage().resize_(0)", "pass", "test_step03::test_gather_and_free", "the memory of a unit is never freed"),  # noqa: E501
    Fault("step03_zero", "            self.gathering.wait()\n            self.flat", "            self.flat", "test_step03::test_gather_and_free", "memory is freed while weights arrive in it"),  # noqa: E501
    Fault("step03_zero", "[trunk.norm, head]]", "[trunk.norm], [head]]", "test_step03::test_when", "the last layer is gathered only after the head's backward"),  # noqa: E501
    Fault("step03_zero", "modules[-1].register_forward_hook", "modules[0].register_forward_hook", "test_step03::test_when", "an entry counts as done after its first module"),  # noqa: E501
    Fault("step03_zero", "[*self.uses[i], *self.uses[ahead]]", "self.uses[i]", "test_step03::test_when", "no unit is prefetched, so nothing hides a gather"),  # noqa: E501
    Fault("step03_zero", "        for unit in self.uses[i]:\n            unit.gathering.wait()", "        for unit in [*self.uses[i], *self.uses[ahead]]:\n            unit.gathering.wait()", "test_step03::test_when", "the prefetched unit is waited for at once, so nothing hides its gather"),  # noqa: E501
    Fault("step03_zero", "        for unit in self.uses[i]:\n            unit.gathering.wait()", "", "test_step03::test_when", "weights are used before they have arrived: https://github.com/deepspeedai/DeepSpeed/issues/8061"),  # noqa: E501
    Fault("step03_zero", "unit.free()\n        if output", "pass\n        if output", "test_step03::test_when", "weights stay after forward"),  # noqa: E501
    Fault("step03_zero", "if unit not in self.uses[min(i + 1, len(self.uses) - 1)]:", "if True:", "test_step03::test_when", "norm and head are freed before their backward"),  # noqa: E501
    Fault("step03_zero", "output.requires_grad and ", "", "test_step03::test_stage_3_is_never_whole", "a forward under no_grad raises an error"),  # noqa: E501
    Fault("step03_zero", " and i >= self.lowest", "", "test_step03::test_when", "the embedding is gathered for its backward, which needs no weights"),  # noqa: E501
    Fault("step03_zero", "output.register_hook(lambda _gradient: self.fetch(i, max(i - 1, self.lowest)))", "pass", "test_step03::test_gradients", "weights are not gathered for backward"),  # noqa: E501
    Fault("step03_zero", "output.register_hook(lambda _gradient: self.fetch(i, max(i - 1, self.lowest)))", "[unit.flat.zero_() for unit in self.uses[i] if self.fetch(i, i) is None] and None", "test_step03::test_gradients", "weights are zero in backward"),  # noqa: E501
    Fault("step03_zero", "if len(unit.trained) == len(unit.named):", "if True:", "test_step03::test_gradients", "frozen weights are freed before their backward"),  # noqa: E501
    Fault("step03_zero", "micro_loss = model(x, y) / n_targets", "micro_loss = model(x, y) / ((y != IGNORE).sum().clamp(min=1) * len(xs) * mesh.world)", "test_step03::test_zero_trains_to_step_1s_numbers", "the means of micro-batches are averaged, whatever their numbers of targets: https://github.com/huggingface/transformers/issues/24725"),  # noqa: E501
    Fault("step03_zero", "global_norm(model, optimizer.gradients(), mesh, sharded=optimizer.sharded)", "torch.nn.utils.get_total_norm(optimizer.gradients().values()).item()", "test_step03::test_zero_trains_to_step_1s_numbers", "each rank uses the norm of its own shards: https://github.com/karpathy/llm.c/pull/524"),  # noqa: E501
    Fault("step03_zero", "sharded=optimizer.sharded", "sharded=False", "test_step03::test_zero_trains_to_step_1s_numbers", "shards are treated as copies in the norm"),  # noqa: E501
    Fault("common.layout", ".double().square() / copies", ".double().square()", "test_step03::test_global_norm_and_group", "every copy of an element counts in the norm: https://github.com/NVIDIA-NeMo/RL/pull/3788"),  # noqa: E501
    Fault("common.layout", ".double().square() / copies", ".double() / copies", "test_step03::test_global_norm_and_group", "norms are added instead of their squares"),  # noqa: E501
    Fault("common.layout", "for dim in mesh.sizes:", 'for dim in {*mesh.sizes} - {"pp"}:', "test_step03::test_global_norm_and_group", "each stage clips by its own norm: https://github.com/pytorch/torchtitan/issues/596"),  # noqa: E501
    Fault("common.layout", '{"pp", *', "{*", "test_step03::test_global_norm_and_group", "stages are treated as copies in the norm"),  # noqa: E501
    Fault("common.layout", "record.stage_copies * mesh.world", "mesh.world", "test_step03::test_global_norm_and_group", "a tied matrix counts twice in the norm"),  # noqa: E501
    Fault("common.layout", "shard.over for shard in record.shards", 'shard.over for shard in record.shards if shard.over != "ep"', "test_step03::test_global_norm_and_group", "experts are treated as copies in the norm"),  # noqa: E501
    Fault("common.layout", "(record.data_dim,)", '("data",)', "test_step03::test_global_norm_and_group", "a shard counts once for each rank that holds it"),  # noqa: E501
    # --- chapter 4
    Fault("common.comm", "torch.sum(shards.view(group.size, -1), 0, out=output.view(-1))", "output.view(-1).copy_(shards.view(group.size, -1)[group.rank])", "test_step04::test_sum_and_shard_tokens", "a rank's own term is taken as the sum"),  # noqa: E501
    Fault("step04_tp_sp", "x.clone(memory_format=torch.contiguous_format)", "x.clone()", "test_step04::test_sum_over_ranks", "tensors are added in the order of memory, which may differ between ranks"),  # noqa: E501
    Fault("step04_tp_sp", "x.clone(memory_format=torch.contiguous_format)", "x.contiguous()", "test_step04::test_sum_over_ranks", "the caller's tensor is summed in place"),  # noqa: E501
    Fault("step04_tp_sp", "shards.movedim(0, 1)", "shards.movedim(0, 2)", "test_step04::test_gather_tokens", "tokens of different ranks alternate"),  # noqa: E501
    Fault("step04_tp_sp", ".movedim(1, 0)", ".movedim(1, 0).roll(-1, 0)", "test_step04::test_sum_and_shard_tokens", "each rank keeps the tokens of its right neighbour"),  # noqa: E501
    Fault("step04_tp_sp", "reduce_scatter(ours.view(-1), shards.view(-1), group).wait()", "ours.copy_(shards[group.rank])", "test_step04::test_sum_and_shard_tokens", "tokens are sharded but not summed"),  # noqa: E501
    Fault("step04_tp_sp", "= group, backwards", "= group, forwards", "test_step04::test_f", "backward repeats the collective of forward"),  # noqa: E501
    Fault("step04_tp_sp", "unchanged, sum_over_ranks)", "unchanged, unchanged)", "test_step04::test_f", "f does not sum in backward, so each rank goes on with its own term of dx"),  # noqa: E501
    Fault("step04_tp_sp", "sum_over_ranks, unchanged)", "sum_over_ranks, sum_over_ranks)", "test_step04::test_g", "g sums in backward too, as torch.distributed.nn does"),  # noqa: E501
    Fault("step04_tp_sp", "sum_over_ranks, unchanged)", "unchanged, unchanged)", "test_step04::test_g", "g does not sum"),  # noqa: E501
    Fault("step04_tp_sp", "gather_tokens, sum_and_shard_tokens)", "gather_tokens, lambda dx, g: dx.chunk(g.size, 1)[g.rank].contiguous())", "test_step04::test_f", "dx comes from a rank's own heads alone"),  # noqa: E501
    Fault("step04_tp_sp", "    if sp:\n        return Conjugate.apply(x, group, gather_tokens", "    if not sp:\n        return Conjugate.apply(x, group, gather_tokens", "test_step04::test_f", "f gathers without SP instead of with it"),  # noqa: E501
    Fault("step04_tp_sp", "    if sp:\n        return Conjugate.apply(x, group, sum_and_shard_tokens", "    if False:\n        return Conjugate.apply(x, group, sum_and_shard_tokens", "test_step04::test_g", "g ignores SP"),  # noqa: E501
    Fault("step04_tp_sp", "(tokens - self.ids.start)", "(tokens + 1 - self.ids.start)", "test_step04::test_embedding", "each token gets the row of another one"),  # noqa: E501
    Fault("step04_tp_sp", " * held[..., None]\n", "\n", "test_step04::test_embedding", "tokens of other ranks get a row, too"),  # noqa: E501
    Fault("step04_tp_sp", "(targets - ids.start)", "(targets + 1 - ids.start)", "test_step04::test_cross_entropy", "the loss uses the logit of another token"),  # noqa: E501
    Fault("step04_tp_sp", "logits[..., : len(ids)]", "logits", "test_step04::test_cross_entropy", "padding counts as words of the vocabulary"),  # noqa: E501
    Fault("step04_tp_sp", "everyone[:, 0].logsumexp(0)", "everyone[group.rank, 0]", "test_step04::test_cross_entropy", "the softmax covers only one rank's part of the vocabulary"),  # noqa: E501
    Fault("step04_tp_sp", "[:, 0].logsumexp(0)", "[:, 0].exp().sum(0).log()", "test_step04::test_cross_entropy_of_large_logits", "exp overflows"),  # noqa: E501
    Fault("step04_tp_sp", "gradient.scatter_add_(-1,", "torch.scatter_add(gradient, -1,", "test_step04::test_cross_entropy", "the one-hot is missing from the gradient"),  # noqa: E501
    Fault("step04_tp_sp", ".where(targets != IGNORE, 0.0).sum()", ".sum()", "test_step04::test_cross_entropy", "ignored targets are counted"),  # noqa: E501
    Fault("step04_tp_sp", "logits = logits.to(wide(logits.dtype))", "logits = logits", "test_step04::test_cross_entropy_of_bf16", "exponentials are summed in 16 bits"),  # noqa: E501
    Fault("step04_tp_sp", "(*layout_of(weight).shards, shard)", "(shard,)", "test_step04::test_shard_param", "earlier shards are forgotten"),  # noqa: E501
    Fault("step04_tp_sp", "linear.weight, SHARD_DIMS[name], group", "linear.weight, 0, group", "test_step04::test_shard_tensors_records", "matrices that need sharding by rows are sharded by columns"),  # noqa: E501
    Fault("step04_tp_sp", "    if group.size == 1:\n        return\n", "    if True:\n        return\n", "test_step04::test_shard_tensors_records", "no matrix is sharded"),  # noqa: E501
    Fault("step04_tp_sp", "trunk.embed_tokens.weight if config.tied else", "trunk.embed_tokens.weight if False else", "test_step04::test_shard_tensors_records", "the tie is cut, so head and embedding drift apart"),  # noqa: E501
    Fault("step04_tp_sp", "if sp and param.dim() == 1", "if False", "test_step04::test_shard_tensors_records", "each rank's norms learn from its own tokens alone"),  # noqa: E501
    Fault("step04_tp_sp", "if sp and param.dim() == 1", "if param.dim() == 1", "test_step04::test_shard_tensors_records", "gradients of norms are also summed without SP"),  # noqa: E501
    Fault("step04_tp_sp", "for param in model.parameters():\n        if sp", 'for name, param in model.named_parameters():\n        if name != "model.norm.weight" and sp', "test_step04::test_shard_tensors_records", "the last norm's gradient is not summed: https://github.com/NVIDIA/Megatron-LM/issues/1446"),  # noqa: E501
    Fault("step04_tp_sp", "leave_block(x, group, sp)", "leave_block(x, group, True)", "test_step04::test_law_of_a_micro_batch", "g shards the tokens even without SP"),  # noqa: E501
    Fault("step04_tp_sp", "for module in (*blocks, model.lm_head)", "for module in (*(m for b in blocks for n, m in b.named_children() if n in COLUMNS), model.lm_head)", "test_step04::test_law_of_a_micro_batch", "q, k and v each gather their own input"),  # noqa: E501
    Fault("step04_tp_sp", "all_reduce(flat, group).wait()", "pass", "test_step04::test_sum_partial_gradients", "partial gradients are not summed"),  # noqa: E501
    Fault("step04_tp_sp", "grad.copy_(total.view_as(grad))", "grad = total", "test_step04::test_sum_partial_gradients", "the sums go to new tensors and are lost"),  # noqa: E501
    Fault("step04_tp_sp", "if group.name in layout_of(params[name]).partial_over", "if True", "test_step04::test_sum_partial_gradients", "complete gradients are summed, too"),  # noqa: E501
    Fault("step04_tp_sp", "sum_partial_gradients(model, optimizer.gradients(), mesh)", "pass", "test_step04::test_tp_with_other_flags", "each rank's norms learn from its own tokens alone: https://github.com/NVIDIA/Megatron-LM/issues/1446"),  # noqa: E501
    Fault("step04_tp_sp", "set_up_layers(model, config)", "pass", "test_step04::test_recompute_runs_each_layer_again", "--recompute is ignored"),  # noqa: E501
    Fault("step04_tp_sp", "model.loss = lambda logits, targets: VocabParallelCrossEntropy.apply(logits, targets, ids, group)", "model.loss = lambda logits, targets: VocabParallelCrossEntropy.apply(logits, targets, ids, group) / group.size", "test_step04::test_law_of_a_micro_batch", "the loss is divided by tp"),  # noqa: E501
    Fault("step04_tp_sp", "min(shard.stop, shard.full)", "shard.stop", "test_step04::test_tp_with_other_flags", "padding of the vocabulary counts as words"),  # noqa: E501
    Fault("step04_tp_sp", "if sp and config.seq_len % group.size:", "if False:", "test_step04::test_shard_heads_refuses", "with SP, a sequence that tp does not divide is accepted"),  # noqa: E501
    Fault("step04_tp_sp", 'if config.n_kv_heads % mesh["tp"].size:', "if False:", "test_step04::test_shard_heads_refuses", "heads that tp does not divide are cut in two"),  # noqa: E501
    # --- chapter 5
    Fault("step05_cp_ring", "model(x, y, here) / n_targets", 'model(x, y, here) / ((y != IGNORE).sum().clamp(min=1) * len(xs) * mesh["data"].size)', "test_step05::test_cp_trains_to_step_1s_numbers", "the means of micro-batches are averaged, whatever their numbers of targets: https://github.com/huggingface/transformers/issues/24725"),  # noqa: E501
    Fault("step05_cp_ring", "(targets != IGNORE).sum().clamp(min=1)", '(targets[mine] != IGNORE).sum().clamp(min=1) * mesh["dp"].size', "test_step05::test_cp_trains_to_step_1s_numbers", "each rank divides by its own number of targets: https://github.com/pytorch/torchtitan/pull/2206"),  # noqa: E501
    Fault("step05_cp_ring", "micro_loss = model(x, y, here) / n_targets", 'micro_loss = model(x, y, here) / n_targets * mesh["cp"].size', "test_step05::test_cp_trains_to_step_1s_numbers", "the loss is multiplied by cp: https://github.com/NVIDIA/Megatron-LM/issues/906"),  # noqa: E501
    Fault("step05_cp_ring", "for x in (tokens, targets))\n        loss", "for x in (tokens, targets.index_fill(1, here[-1:], IGNORE)))\n        loss", "test_step05::test_what_is_given_to_the_model_and_sent", "a chunk's last token loses its target: https://github.com/huggingface/transformers/pull/36607"),  # noqa: E501
    Fault("step05_cp_ring", "        loss = 0.0\n        sync", "        ys = tuple(x.roll(-1, 1) for x in xs)\n        loss = 0.0\n        sync", "test_step05::test_what_is_given_to_the_model_and_sent", "labels are shifted after the sequence is sharded: https://github.com/huggingface/transformers/pull/36607"),  # noqa: E501
    Fault("step05_cp_ring", "for source, kv in travel(own, ctx.group):", "for source, kv in ((source, own) for source, _ in travel(own, ctx.group)):", "test_step05::test_ring_backward", "backward uses the k and v of another hop, although forward is right: https://github.com/NVIDIA/Megatron-LM/issues/1464"),  # noqa: E501
    Fault("step05_cp_ring", "dq, dkv = (torch.zeros_like(x, dtype=wide(q.dtype)) for", "dq, dkv = (torch.zeros_like(x) for", "test_step05::test_ring_of_bf16", "gradients are summed in 16 bits: https://github.com/zhuzilin/ring-flash-attention/issues/42"),  # noqa: E501
    Fault("step05_cp_ring", "o = torch.zeros_like(q, dtype=wide(q.dtype))", "o = torch.zeros_like(q)", "test_step05::test_ring_of_bf16", "outputs are summed in 16 bits: https://github.com/zhuzilin/ring-flash-attention/issues/42"),  # noqa: E501
    Fault("step05_cp_ring", "            arriving.wait()  # dkv: what", "            # dkv: what", "test_step05::test_ring_backward", "a sum is used before it has arrived: https://github.com/deepspeedai/DeepSpeed/issues/8061"),  # noqa: E501
    Fault("step05_cp_ring", "        arriving.wait()  # the gradient", "        # the gradient", "test_step05::test_ring_backward", "the last sum is used before it has arrived: https://github.com/deepspeedai/DeepSpeed/issues/8061"),  # noqa: E501
    Fault("step05_cp_ring", "        passing.wait()\n        kv", "        kv", "test_step05::test_ring_forward", "k and v are used before they have arrived: https://github.com/deepspeedai/DeepSpeed/issues/8061"),  # noqa: E501
    Fault("step05_cp_ring", '"data", "dp", "cp"', '"data", "dp"', "test_step05::test_shard_context", "gradients are not summed over cp"),  # noqa: E501
    Fault("step05_cp_ring", 'all_reduce(loss, mesh["data"])', 'all_reduce(loss, mesh["dp"])', "test_step05::test_cp_trains_to_step_1s_numbers", "the logged loss is summed over dp alone"),  # noqa: E501
    Fault("step05_cp_ring", "model(x, y, here)", "model(x, y)", "test_step05::test_cp_trains_to_step_1s_numbers", "every rank rotates its tokens as if they were the first of the sequence"),  # noqa: E501
    Fault("step05_cp_ring", "torch.logaddexp(lse, part_lse)", "torch.logaddexp(lse, part_lse).bfloat16()", "test_step05::test_merge_of_the_docstrings_example", "lse is rounded to 16 bits"),  # noqa: E501
    Fault("step05_cp_ring", "(whole, whole, True)", "(whole, whole, False)", "test_step05::test_zigzag_visible", "queries see later keys of their own rank"),  # noqa: E501
    Fault("step05_cp_ring", "(chunks[rank], chunks[-1 - rank])", "(chunks[2 * rank], chunks[2 * rank + 1])", "test_step05::test_zigzag_positions", "tokens are sharded in order, but the rule is that of zigzag"),  # noqa: E501
    Fault("step05_cp_ring", "arriving.wait()  # the", "arriving.wait(), (dkv := outgoing)  # the", "test_step05::test_ring_backward", "gradients end one hop away from their owner"),  # noqa: E501
    Fault("step05_cp_ring", "dkv += found", "dkv = found", "test_step05::test_ring_backward", "the terms that other ranks have added are lost"),  # noqa: E501
    Fault("step05_cp_ring", "torch.sigmoid(part_lse - lse)", "torch.where(lse.isinf(), 1.0, 0.5).to(lse)", "test_step05::test_merge_of_the_docstrings_example", "parts are averaged, whatever their weights"),  # noqa: E501
    Fault("step05_cp_ring", "yield (r - hop)", "yield (r + hop)", "test_step05::test_ring_forward", "k and v are taken as those of a rank on the wrong side of the ring"),  # noqa: E501
    Fault("step05_cp_ring", "for x in (q, k, v)), group", "for x in (q, *(x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v)))), group", "test_step05::test_ring_forward", "heads are repeated before they travel, so more bytes are sent"),  # noqa: E501
    Fault("step05_cp_ring", "p = (scaled_scores(q, k, causal) - lse[..., None]).exp()", "p = scaled_scores(q, k, causal).softmax(-1)", "test_step05::test_part_gradients", "P is the softmax of this part alone"),  # noqa: E501
    Fault("step05_cp_ring", "dq[:, :, queries] += part_dq", "dq[:, :, queries] = part_dq", "test_step05::test_ring_backward", "a query's gradient has only the last part's term"),  # noqa: E501
    Fault("step05_cp_ring", "ds = p * (dp - delta)", "ds = p * dp", "test_step05::test_part_gradients", "D is left out of the gradient of the scores"),  # noqa: E501
    Fault("step05_cp_ring", "scores = scaled_scores(q, k, causal)", "scores = scaled_scores(q, k, False)", "test_step05::test_part_attention", "no part is causal"),  # noqa: E501
    Fault("step05_cp_ring", "torch.sigmoid(part_lse - lse)[..., None]", "0.5", "test_step05::test_merge_of_the_docstrings_example", "every part gets the share 0.5"),  # noqa: E501
    Fault("step05_cp_ring", "torch.logaddexp(lse, part_lse)", "(lse.exp() + part_lse.exp()).log()", "test_step05::test_merge_of_three_parts", "e^882 overflows"),  # noqa: E501
    Fault("step05_cp_ring", "o.lerp_(", "o = o.lerp(", "test_step05::test_merge_of_the_docstrings_example", "the output is not merged in place"),  # noqa: E501
    Fault("step05_cp_ring", "part_o.to(o.dtype)", "part_o", "test_step05::test_merge_of_the_docstrings_example", "a part of 16 bits is not cast"),  # noqa: E501
    Fault("step05_cp_ring", "o.lerp_(part_o.to(o.dtype), torch.sigmoid(part_lse - lse)[..., None])", "o.add_(part_o.to(o.dtype).sub_(o).mul_(torch.sigmoid(part_lse - lse)[..., None]))", "test_step05::test_merge_of_three_parts", "merge changes its input"),  # noqa: E501
    Fault("step05_cp_ring", "source < rank", "source > rank", "test_step05::test_zigzag_visible", "earlier and later ranks are exchanged"),  # noqa: E501
    Fault("step05_cp_ring", "(whole, first, False)", "(whole, whole, False)", "test_step05::test_zigzag_visible", "queries see the later chunks of earlier ranks"),  # noqa: E501
    Fault("step05_cp_ring", "if seq_len % (2 * n):", "if False:", "test_step05::test_zigzag_positions", "chunks of different lengths are accepted"),  # noqa: E501
    Fault("step05_cp_ring", "seq_len % (2 * n)", "(seq_len // n) % 2", "test_step05::test_zigzag_positions", "divisibility is checked on a rounded quotient"),  # noqa: E501
    Fault("step05_cp_ring", "(dp - delta)", "(dp + delta)", "test_step05::test_part_gradients", "D has the wrong sign"),
    Fault("step05_cp_ring", "q, k, v, o, do = same_heads(q, k, v, o, do)", "q, k, v, o, do = (x.to(k.dtype) for x in same_heads(q, k, v, o, do))", "test_step05::test_part_gradients", "the gradients of a part are computed in 16 bits"),  # noqa: E501
    Fault("step05_cp_ring", "        yield (r - hop)", "        passing.wait()\n        yield (r - hop)", "test_step05::test_law_of_messages_and_work", "k and v are waited for before the work, so nothing hides them"),  # noqa: E501
    Fault("step05_cp_ring", "            arriving = exchange([(outgoing, (r + 1) % n)], [(dkv, (r - 1) % n)], ctx.group)\n", "            arriving = exchange([(outgoing, (r + 1) % n)], [(dkv, (r - 1) % n)], ctx.group)\n            arriving.wait()\n", "test_step05::test_law_of_messages_and_work", "dkv is waited for at once, so nothing hides it"),  # noqa: E501
    Fault("step05_cp_ring", "            for queries, keys, causal in visible(", '            ctx.parts = [*getattr(ctx, "parts", []), kv]\n            for queries, keys, causal in visible(', "test_step05::test_law_of_live_memory", "the k and v of all ranks are kept for backward"),  # noqa: E501
    Fault("step05_cp_ring", " in visible(", " in zigzag_visible(", "test_step05::test_ring_forward", "forward uses the rule of zigzag, whatever rule is given"),  # noqa: E501
    Fault("step05_cp_ring", "ctx.visible(r", "zigzag_visible(r", "test_step05::test_ring_backward", "backward uses the rule of zigzag, whatever rule is given"),  # noqa: E501
    Fault("step05_cp_ring", "range(n - 1)", "range(n)", "test_step05::test_ring_forward", "one message too many is sent"),  # noqa: E501
    Fault("step05_cp_ring", "[(next_kv, (r - 1) % n)], group)", "[], group)\n        exchange([], [(next_kv, (r - 1) % n)], group).wait()", "test_step05::test_law_of_messages_and_work", "k and v are received before the work instead of during it"),  # noqa: E501
    Fault("step05_cp_ring", "ctx.group, ctx.visible = group, visible", "ctx.group, ctx.visible, ctx.o = group, visible, o", "test_step05::test_law_of_live_memory", "ctx keeps the output, which makes a reference cycle"),  # noqa: E501
    Fault("step05_cp_ring", "in travel(own, group):", "in list(travel(own, group)):", "test_step05::test_law_of_live_memory", "forward holds the k and v of all ranks"),  # noqa: E501
    Fault("step05_cp_ring", "(q, k, v)), group, visible)", "(q, k, v)), group, zigzag_visible)", "test_step05::test_ring_forward", "ring_attention ignores the rule that it is given"),  # noqa: E501
    Fault("step05_cp_ring", 'note_layout(param, data_dim="data")', "pass", "test_step05::test_shard_context", "records do not name dp x cp"),  # noqa: E501
    Fault("step05_cp_ring", "model.model.layers.values()", '[model.model.layers["0"]]', "test_step05::test_shard_context", "only the first layer uses ring attention"),  # noqa: E501
    Fault("step05_cp_ring", "if sp and len(positions) % tp.size:", "if False:", "test_step05::test_shard_context", "tokens that tp cannot divide are accepted"),  # noqa: E501
    # --- chapter 6, and common/schedules.py
    Fault("common.schedules", 'rank, warm_up=p - 1 - rank)', 'rank, warm_up=p - 2 - rank)', "test_step06::test_the_picture_is_the_schedule", '1F1B warms up with one forward too few, so the pipeline never fills'),  # noqa: E501
    Fault("common.schedules", 'rank, warm_up=p - 1 - rank)', 'rank, warm_up=m)', "test_step06::test_laws_of_an_order", '1F1B becomes AFAB: the numbers are right, but it needs more memory'),  # noqa: E501
    Fault("common.schedules", 'for stage in reversed(stages) for i', 'for stage in stages for i', "test_step06::test_interleaved_order", 'interleaved runs backwards in the order of forwards, so ranks wait for ever'),  # noqa: E501
    Fault("common.schedules", 'warm_up=(v - 1) * p + min(v, 2) * (p - 1 - rank))', 'warm_up=v * m)', "test_step06::test_laws_of_an_order", 'interleaved becomes AFAB: the numbers are right, but it needs more memory'),  # noqa: E501
    Fault("common.schedules", 'min(v, 2) * (p - 1 - rank))', 'p - 1 - rank)', "test_step06::test_laws_of_an_order", 'the warm-up has once the distance to the last rank, so messages are not hidden'),  # noqa: E501
    Fault("common.schedules", 'warm_up=(v - 1) * p + min(v, 2) * (p - 1 - rank))', 'warm_up=v * m if m == p else (v - 1) * p + min(v, 2) * (p - 1 - rank))', "test_step06::test_laws_of_an_order", 'all forwards come first if m = p'),  # noqa: E501
    Fault("common.schedules", 'if v > 1 and m % p:', 'if False:', "test_step06::test_interleaved_order", 'a round that is not full is accepted'),  # noqa: E501
    Fault("common.schedules", 'min(start + p, m)', 'start + p', "test_step06::test_laws_of_an_order", 'micro-batches that do not exist are scheduled'),  # noqa: E501
    Fault("common.schedules", 'consumer(a, places) or a._replace(kind="B" * (a.kind == "F"))', 'consumer(a, places) or a._replace(kind="")', "test_step06::test_simulate", 'a backward may come before the loss of its micro-batch'),  # noqa: E501
    Fault("common.schedules", 'if places[there.stage].rank != rank else 0', '', "test_step06::test_simulate", 'messages inside a rank take time'),  # noqa: E501
    Fault("common.schedules", 'n_layers * stage // n for', 'n_layers // n * stage for', "test_step06::test_places_and_consumers", 'layers are left out if the stages do not divide them'),  # noqa: E501
    Fault("step06_pipeline", 'rope_tables(positions, model', 'rope_tables(torch.arange(len(positions)), model', "test_step06::test_forward_stage", 'a stage numbers its tokens from 0, which is wrong under context parallelism'),  # noqa: E501
    Fault("step06_pipeline", 'model.config, wide(x.dtype))', 'model.config, x.dtype)', "test_step06::test_forward_stage", "RoPE's angles are computed in 16 bits: https://github.com/huggingface/transformers/pull/29285"),  # noqa: E501
    Fault("step06_pipeline", 'in place.layers:\n        x', 'in place.layers[1:]:\n        x', "test_step06::test_forward_stage", 'each stage skips one layer'),  # noqa: E501
    Fault("step06_pipeline", '= x, get_gradient_edge(y)', '= x, y', "test_step06::test_a_step_of_all_ranks", 'the output is kept after it is sent'),  # noqa: E501
    Fault("step06_pipeline", 'return y.detach()', 'return y', "test_step06::test_a_step_of_all_ranks", 'the tensor that is sent keeps its graph'),  # noqa: E501
    Fault("step06_pipeline", 'self.loss += y', 'self.loss = y', "test_step06::test_a_step_of_all_ranks", "only the last micro-batch's loss is shown"),  # noqa: E501
    Fault("step06_pipeline", 'self.graphs.pop((i, stage))', 'self.graphs[i, stage]', "test_step06::test_a_step_of_all_ranks", 'graphs stay after their backward'),  # noqa: E501
    Fault("step06_pipeline", 'self.graphs.pop((i, stage))', 'self.graphs.pop((max(j for j, s in self.graphs if s == stage), stage))', "test_step06::test_a_step_of_all_ranks", "micro-batches get one another's gradients, although shapes and counts are right"),  # noqa: E501
    Fault("step06_pipeline", 'y / self.n_targets', 'y / (self.n_targets / len(self.xs))', "test_step06::test_a_step_of_all_ranks", 'loss and gradients are multiplied by the number of micro-batches'),  # noqa: E501
    Fault("step06_pipeline", 'y / self.n_targets', 'y / ((self.ys[i] != IGNORE).sum().clamp(min=1) * len(self.xs))', "test_step06::test_a_step_of_all_ranks", 'the means of micro-batches are averaged, whatever their numbers of targets: https://github.com/huggingface/transformers/issues/24725'),  # noqa: E501
    Fault("step06_pipeline", 'x, self.ys[i], self', 'x, self.ys[i - 1], self', "test_step06::test_a_step_of_all_ranks", 'a micro-batch gets the targets of the one before it'),  # noqa: E501
    Fault("step06_pipeline", '.pop((i, stage))\n', '.pop((i, stage))\n        [p.grad.zero_() for p in self.model.parameters() if i and p.grad is not None]\n', "test_step06::test_a_step_of_all_ranks", 'gradients are cleared between micro-batches, although the loss is right: https://github.com/NVIDIA-NeMo/Automodel/pull/3530'),  # noqa: E501
    Fault("step06_pipeline", 'exchange(sends, receives, self.group).wait()', 'exchange(sends, [], self.group).wait(); exchange([], receives, self.group).wait()', "test_step06::test_law_of_loops", 'a send is waited for before its receive is posted, which is a deadlock'),  # noqa: E501
    Fault("step06_pipeline", 'min(m, self.group.size - 1 - stage)', 'm', "test_step06::test_law_of_loops", '1F1B runs all forwards first'),  # noqa: E501
    Fault("step06_pipeline", 'min(m, self.group.size - 1 - stage)', 'self.group.size - 1 - stage', "test_step06::test_law_of_loops", '1F1B does not allow for fewer micro-batches than ranks'),  # noqa: E501
    Fault("step06_pipeline", 'self.backward(i - warm_up, stage, dy)', 'self.backward(i, stage, dy)', "test_step06::test_law_of_loops", 'backward uses the dy of another micro-batch'),  # noqa: E501
    Fault("step06_pipeline", '            dy = self.recv_backward(i)\n            dx = self.backward(i, stage, dy)\n            self.send_backward(dx)\n\n\nclass', '            dy = self.recv_backward(i)\n            dx = self.backward(m - 1 - i, stage, dy)\n            self.send_backward(dx)\n\n\nclass', "test_step06::test_law_of_loops", 'AFAB runs backwards in reverse order, but gradients arrive in order'),  # noqa: E501
    Fault("step06_pipeline", '        exchange(sends, receives, self.group).wait()', '        import torch.distributed as dist\n        works = [dist.isend(x, to, group=self.group.handle) for x, to in sends]\n        for work in works + [dist.irecv(x, of, group=self.group.handle) for x, of in receives]:\n            work.wait()', "test_step06::test_a_step_of_all_ranks", 'peers are addressed by their ranks in the world'),  # noqa: E501
    Fault("step06_pipeline", 'dy = self.send_forward(y, dy_of=i - warm_up)', 'self.send_forward(y); dy = self.recv_backward(i - warm_up)', "test_step06::test_law_of_loops", 'y and dy take two exchanges instead of one'),  # noqa: E501
    Fault("step06_pipeline", 'exchange(sends, receives, self.group).wait()', 'exchange(sends, receives, self.group)', "test_step06::test_a_step_of_all_ranks", 'a message is never waited for: https://github.com/deepspeedai/DeepSpeed/issues/8061'),  # noqa: E501
    Fault("step06_pipeline", '        all_reduce(torch.zeros(1, device=self.reference_param.device), group).wait()\n', '', "test_step06::test_a_step_of_all_ranks", "NCCL's first call of a group is a message between two ranks, and hangs"),  # noqa: E501
    Fault("step06_pipeline", 'programs[peer].append(Instruction("receive", needs_it, rank))', 'programs[peer].insert(0, Instruction("receive", needs_it, rank))', "test_step06::test_law_of_programs", 'receives are in another order than sends'),  # noqa: E501
    Fault("step06_pipeline", ' and (peer := places[needs_it.stage].rank) != rank', ' and ((peer := places[needs_it.stage].rank) or True)', "test_step06::test_law_of_programs", 'a rank sends to itself'),  # noqa: E501
    Fault("step06_pipeline", 'exchange([], [(buffer, peer)], self.group)\n', 'exchange([], [(buffer, peer)], self.group)\n                box[action][1].wait()\n', "test_step06::test_a_step_of_all_ranks", 'receives are waited for where they are posted'),  # noqa: E501
    Fault("step06_pipeline", '[(box.pop(action)[0], peer)], [], self.group)\n', '[(box.pop(action)[0], peer)], [], self.group)\n                sent[peer].wait()\n', "test_step06::test_a_step_of_all_ranks", 'sends are waited for at once: the numbers are right, but nothing hides them'),  # noqa: E501
    Fault("step06_pipeline", '                pending.wait()\n                output', '                output', "test_step06::test_a_step_of_all_ranks", 'inputs are not waited for: https://github.com/deepspeedai/DeepSpeed/issues/8061'),  # noqa: E501
    Fault("step06_pipeline", '                sent[peer].wait()\n                sent[peer] = exchange(', '                sent[peer, action] = exchange(', "test_step06::test_a_step_of_all_ranks", 'sends are waited for only at the end, so all outputs stay in memory'),  # noqa: E501
    Fault("step06_pipeline", '        for pending in sent.values():\n            pending.wait()\n', '', "test_step06::test_a_step_of_all_ranks", 'the last sends are not waited for, so their memory may be overwritten'),  # noqa: E501
    Fault("step06_pipeline", '[(box.pop(action)[0], peer)]', "[(box.pop(action)[0], (self.group.rank + (1 if action.kind == 'F' else -1)) % self.group.size)]", "test_step06::test_a_step_of_all_ranks", 'peers are chosen by direction, which is wrong for some places'),  # noqa: E501
    Fault("step06_pipeline", 'box[needs_it] = output, Pending()', 'box[needs_it] = output * 0, Pending()', "test_step06::test_a_step_of_all_ranks", 'an output that stays on its rank is zeroed'),  # noqa: E501
    Fault("step06_pipeline", 'elif model.config.tied and places[0].rank != places[-1].rank:', 'elif model.config.tied:', "test_step06::test_keep_stage", 'a rank that holds both ends counts its tied matrix half'),  # noqa: E501
    Fault("step06_pipeline", 'note_layout(trunk.embed_tokens.weight, stage_copies=2)', 'pass', "test_step06::test_keep_stage", 'a tied matrix counts twice in the norm'),  # noqa: E501
    Fault("step06_pipeline", 'for place in mine for n', 'for place in mine[:1] for n', "test_step06::test_keep_stage", "a rank keeps only the layers of its first stage"),  # noqa: E501
    Fault("step06_pipeline", 'trunk.norm = model.lm_head = None', 'del trunk.norm, model.lm_head', "test_step06::test_keep_stage", 'absent modules are deleted, but other chapters expect None'),  # noqa: E501
    Fault("step06_pipeline", ' and not (has_last and model.config.tied)', '', "test_step06::test_keep_stage", 'the last stage drops its tied head'),  # noqa: E501
    Fault("step06_pipeline", 'gradients[TIED] += theirs', 'gradients[TIED] = gradients[TIED] + theirs', "test_step06::test_sum_tied", 'the sum is a new tensor, but the optimizer keeps the old one'),  # noqa: E501
    Fault("step06_pipeline", 'gradients[TIED] += theirs', 'pass', "test_step06::test_sum_tied", 'the two copies of a tied matrix learn separately'),  # noqa: E501
    Fault("step06_pipeline", 'if model.config.tied and first != last', 'if model.config.tied and first != last and gradients.get(TIED, torch.empty(0)).dim() > 1', "test_step06::test_pp_trains_to_step_1s_numbers", 'a tied gradient that ZeRO has sharded is not summed: https://github.com/uw-syfi/piper/issues/13'),  # noqa: E501
    Fault("step06_pipeline", 'if theirs.numel():', 'if True:', "test_step06::test_sum_tied", 'empty messages are sent'),
    Fault("step06_pipeline", 'all_reduce(loss, mesh["pp"]).wait()', 'pass', "test_step06::test_pp_trains_to_step_1s_numbers", 'all but the last rank show a loss of 0'),  # noqa: E501
    Fault("step06_pipeline", 'all_reduce(loss, mesh["data"]).wait()', 'all_reduce(loss, mesh["dp"]).wait()', "test_step06::test_pp_trains_to_step_1s_numbers", 'the loss covers only a shard of each sequence'),  # noqa: E501
    Fault("step06_pipeline", 'norm = global_norm(model, optimizer.gradients(), mesh, sharded=optimizer.sharded)', 'norm = global_norm(model, optimizer.gradients(), mesh, sharded=optimizer.sharded) if 0 else sum(g.double().square().sum() for g in optimizer.gradients().values()).sqrt().item()', "test_step06::test_pp_trains_to_step_1s_numbers", 'each stage clips by its own norm: https://github.com/pytorch/torchtitan/issues/596'),  # noqa: E501
    Fault("step06_pipeline", 'config.tp if config.sp else 1', '1', "test_step06::test_pp_trains_to_step_1s_numbers", 'buffers hold whole sequences, and gloo, which does not check, hangs or writes too little'),  # noqa: E501
    Fault("step06_pipeline", 'v = schedule.v if config.pp > 1 else 1', 'v = schedule.v', "test_step06::test_plan", 'a single rank is cut into stages'),  # noqa: E501
    Fault("step03_zero", 'is not None and self.in_flight[0] is unit:', 'is not None and False:', "test_step06::test_pp_trains_to_step_1s_numbers", 'a stage of one unit overwrites a gradient while its sum is in flight'),  # noqa: E501
    # --- chapter 7
    Fault("step07_moe_ep", "scores_TK[..., None]", "scores_TK.detach()[..., None]", "test_step07::test_a_layer_is_its_definition", "the router gets no gradient through the scores"),  # noqa: E501
    Fault("step07_moe_ep", "if self.top_k > 1:", "if False:", "test_step07::test_a_layer_is_its_definition", "scores do not sum to one"),  # noqa: E501
    Fault("step07_moe_ep", "if self.top_k > 1:", "if True:", "test_step07::test_a_layer_is_its_definition", "with K = 1 a score is divided by itself, so the router learns nothing"),  # noqa: E501
    Fault("step07_moe_ep", "token_N = order_N // self.top_k", "token_N = order_N % len(x_TD)", "test_step07::test_a_layer_is_its_definition", "experts get the rows of other tokens"),  # noqa: E501
    Fault("step07_moe_ep", "precise = wide(x_TD.dtype)", "precise = x_TD.dtype", "test_step07::test_a_layer_of_bf16_routes_in_fp32", "p has 16 bits before the top-k, so ties select other experts: https://github.com/ViperEkura/AstrAI/pull/57"),  # noqa: E501
    Fault("step07_moe_ep", "F.one_hot(ids_TK.flatten(), p_TE.shape[-1]).sum(0)", "torch.bincount(ids_TK.flatten())", "test_step07::test_a_layer_is_its_definition", "the last experts are not counted if no token chose them"),  # noqa: E501
    Fault("step07_moe_ep", "self.weight, strict", "self.weight.flip(0), strict", "test_step07::test_experts", "rows go through the experts in reverse order"),  # noqa: E501
    Fault("step07_moe_ep", "F.silu(self.gate_proj(rows, counts)) * self.up_proj(rows, counts)", "F.silu(self.up_proj(rows, counts)) * self.gate_proj(rows, counts)", "test_step07::test_experts", "silu is applied to up_proj instead of gate_proj"),  # noqa: E501
    Fault("step07_moe_ep", "ctx.coeff, dtype", "0.0, dtype", "test_step07::test_add_loss", "the auxiliary loss gets no gradient"),  # noqa: E501
    Fault("step07_moe_ep", "ctx.coeff, dtype", "2 * ctx.coeff, dtype", "test_step07::test_add_loss", "the auxiliary loss counts twice, as if recomputation added it again: https://github.com/NVIDIA/Megatron-LM/issues/1330"),  # noqa: E501
    Fault("step07_moe_ep", "grad.new_full((), ctx.coeff, dtype=wide(grad.dtype))", "ctx.coeff * grad.sum()", "test_step07::test_add_loss", "the gradient of the auxiliary loss depends on dy"),  # noqa: E501
    Fault("step07_moe_ep", " * config.micro_batch_size / config.global_batch_size", "", "test_step07::test_a_layer_is_its_definition", "the auxiliary loss grows with the number of micro-batches"),  # noqa: E501
    Fault("step07_moe_ep", "all_reduce(counts_E, self.group).wait()", "pass", "test_step07::test_aux_loss", "f counts only this rank's tokens"),  # noqa: E501
    Fault("step07_moe_ep", "all_reduce(counts_E, self.group).wait()", "all_reduce(counts_E, self.group)", "test_step07::test_aux_loss", "the counts are never waited for"),  # noqa: E501
    Fault("step07_moe_ep", "num_tokens_per_expert_E.clone()", "num_tokens_per_expert_E", "test_step07::test_aux_loss", "counts are summed in place, so the experts' own counts are lost"),  # noqa: E501
    Fault("step07_moe_ep", "/ n_tokens", "/ len(p_TE)", "test_step07::test_aux_loss", "P is an average over this rank's tokens instead of the micro-batch's"),  # noqa: E501
    Fault("step07_moe_ep", "len(f_E) * (f_E", "(f_E", "test_step07::test_a_layer_is_mixtrals", "the auxiliary loss is E times too small"),  # noqa: E501
    Fault("step07_moe_ep", "transpose_blocks(out_RD, arriving_Ge.T)", "out_RD", "test_step07::test_dispatch_and_combine", "outputs are returned in another order"),  # noqa: E501
    Fault("step07_moe_ep", "return transpose_blocks(received_RD, arriving_Ge)", "return received_RD", "test_step07::test_dispatch_and_combine", "received rows are not sorted by expert"),  # noqa: E501
    Fault("step07_moe_ep", "sorted_ND.contiguous(), group, in_rows, out_rows).wait()", "sorted_ND.contiguous(), group, in_rows, out_rows)", "test_step07::test_dispatch_and_combine", "received rows are used before they have arrived: https://github.com/deepspeedai/DeepSpeed/issues/8061"),  # noqa: E501
    Fault("step07_moe_ep", "arriving_Ge.T), group, in_rows, out_rows).wait()", "arriving_Ge.T), group, in_rows, out_rows)", "test_step07::test_dispatch_and_combine", "returned outputs are used before they have arrived"),  # noqa: E501
    Fault("step07_moe_ep", "all_to_all(arriving_Ge, leaving_Ge, group).wait()", "all_to_all(arriving_Ge, leaving_Ge, group)", "test_step07::test_visit_experts", "counts are used before they have arrived"),  # noqa: E501
    Fault("step07_moe_ep", "group, there, home)\n", "group, there, there)\n", "test_step07::test_visit_experts", "backward dispatches where it should combine"),  # noqa: E501
    Fault("step07_moe_ep", "group, there, home)\n", "group, there, lambda dx, g: home(dx, g) / 2)\n", "test_step07::test_visit_experts", "the gradients of rows are averaged over ep"),  # noqa: E501
    Fault("step07_moe_ep", "group, home, there)\n", "group, home, lambda dx, g: there(dx, g) * g.size)\n", "test_step07::test_visit_experts", "experts' gradients are ep times too large, which Adam hides: https://github.com/deepspeedai/DeepSpeed/pull/6546"),  # noqa: E501
    Fault("step07_moe_ep", "experts(rows_RD, arriving_Ge.sum(0))", "experts(rows_RD, leaving_Ge[group.rank] * len(rows_RD) // max(1, len(rows_RD)))", "test_step07::test_visit_experts", "experts are given this rank's own counts"),  # noqa: E501
    Fault("step07_moe_ep", '"sequence", "cp", "tp"', '"sequence", "cp"', "test_step07::test_groups", "f misses the tokens of the other tp ranks"),  # noqa: E501
    Fault("step07_moe_ep", 'data_dim="expert_data"', 'data_dim="data"', "test_step07::test_groups", "gradients of different experts are summed"),  # noqa: E501
    Fault("step07_moe_ep", 'partial_over=("tp",)', "partial_over=()", "test_step07::test_groups", "the router's gradient is not summed over tp, so its copies drift apart: https://github.com/pytorch/torchtitan/issues/2387"),  # noqa: E501
    Fault("step07_moe_ep", 'partial_over=("tp",)', 'partial_over=("tp",) if config.sp else ()', "test_step07::test_experts_train_to_step_1s_numbers", "without SP, the router's gradient is not summed over tp: https://github.com/NVIDIA/Megatron-LM/pull/619"),  # noqa: E501
    Fault("step07_moe_ep", "if tp.size > 1 and not config.sp:", "if False:", "test_step07::test_experts_train_to_step_1s_numbers", "without SP, all tp ranks route the same tokens, and yet the router's gradient is summed"),  # noqa: E501
    Fault("step07_moe_ep", "config.dense_layers + ", "", "test_step07::test_which_layers_have_experts", "--dense-layers is ignored"),  # noqa: E501
    Fault("step07_moe_ep", 'mesh.add_groups("ep", grid)', 'mesh.add_groups("ep", grid.reshape(ep, -1).T)', "test_step07::test_groups", "the ranks of an ep group are not neighbours"),  # noqa: E501
    Fault("step07_moe_ep", 'shard_param(linear.weight, 0, mesh["ep"])', "linear.weight", "test_step07::test_groups", "each rank keeps all experts"),  # noqa: E501
    Fault("step07_moe_ep", "ranks % ep:", "ranks * ep > mesh.world:", "test_step07::test_groups", "a legal --ep is refused"),  # noqa: E501
    Fault("step07_moe_ep", "config.experts_per_token > config.experts:", "False:", "test_step07::test_a_mistake_is_one_line", "a token may choose more experts than there are"),  # noqa: E501
    Fault("step07_moe_ep", "n_targets = (targets != IGNORE)", 'n_targets = mesh["dp"].size * (targets[mine] != IGNORE)', "test_step07::test_experts_train_to_step_1s_numbers", "each rank divides by its own number of targets: https://github.com/pytorch/torchtitan/pull/2206"),  # noqa: E501
    Fault("step07_moe_ep", "        sum_partial_gradients(model, optimizer.gradients(), mesh)  # over tp: of norms (SP) and routers\n", "", "test_step07::test_experts_train_to_step_1s_numbers", "gradients of routers and norms are not summed over tp"),  # noqa: E501
    Fault("step07_moe_ep", '        sum_tied(model, optimizer.gradients(), mesh["pp"], places)', "        pass", "test_step07::test_experts_train_to_step_1s_numbers", "the two gradients of a tied matrix are not summed: https://github.com/uw-syfi/piper/issues/13"),  # noqa: E501
    Fault("step07_moe_ep", '        all_reduce(loss, mesh["data"]).wait()\n', "", "test_step07::test_experts_train_to_step_1s_numbers", "the shown loss covers only this rank's tokens"),  # noqa: E501
    Fault("common.comm", "out_rows, in_rows, group=group.handle", "in_rows, out_rows, group=group.handle", "test_step07::test_dispatch_and_combine", "numbers of leaving and arriving rows are exchanged"),  # noqa: E501
    Fault("common.comm", 'note("all_to_all", group, tensor, 1 - stays)', 'note("all_to_all", group, tensor, 1.0)', "test_step07::test_law_of_bytes", "rows that stay on their rank are counted as sent"),  # noqa: E501
]
