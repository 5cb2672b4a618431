"""Mistakes that a chapter's own tests notice. A line each: where it is put in, what it becomes, who must notice, why.

pytest tests/test_faults.py                   every text below stands in the program, once
pytest tests/test_faults.py -m exhaustive     each is put into a copy of the course, and its test must fail there
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """One mistake."""

    module: str  # "step02_ddp" or "common.comm"
    old: str  # text that occurs once in the file
    new: str  # what it becomes
    test: str  # "file::test", in tests/: this one fails
    meaning: str  # what is wrong then; a link, if others had it


# fmt: off
FAULTS = [
    # --- chapter 1, and common/{model,data,layout,trainer}.py
    # --- chapter 2, and common/comm.py
    Fault("step02_ddp", 'missing = n_micro_batches * len(', 'missing = (n_micro_batches - 1) * len(', "test_step02::test_bucket_sync_sums", "the last micro-batch is added after its sum: https://github.com/deepspeedai/DeepSpeed/pull/7985"),  # noqa: E501
    # --- chapter 3
    # --- chapter 4
    # --- chapter 5
    # --- chapter 6, and common/schedules.py
    # --- chapter 7
    Fault("step07_moe_ep", "scores_TK[..., None]", "scores_TK.detach()[..., None]", "test_step07::test_a_layer_is_its_definition", "a deaf router: gates without a gradient"),  # noqa: E501
    Fault("step07_moe_ep", "if self.top_k > 1:", "if False:", "test_step07::test_a_layer_is_its_definition", "scores do not sum to one"),  # noqa: E501
    Fault("step07_moe_ep", "if self.top_k > 1:", "if True:", "test_step07::test_a_layer_is_its_definition", "one score divided by itself: the router learns nothing"),  # noqa: E501
    Fault("step07_moe_ep", "token_N = order_N // self.top_k", "token_N = order_N % len(x_TD)", "test_step07::test_a_layer_is_its_definition", "rows of other tokens"),  # noqa: E501
    Fault("step07_moe_ep", "wide(x.dtype)\n", "x.dtype\n", "test_step07::test_a_layer_of_bf16_routes_in_fp32", "p in 16 bits before top-k: ties, other experts: https://github.com/ViperEkura/AstrAI/pull/57"),  # noqa: E501
    Fault("step07_moe_ep", "F.one_hot(experts_TK.flatten(), p_TE.shape[-1]).sum(0)", "torch.bincount(experts_TK.flatten())", "test_step07::test_a_layer_is_its_definition", "experts that nobody chose are not counted"),  # noqa: E501
    Fault("step07_moe_ep", "self.weight, strict", "self.weight.flip(0), strict", "test_step07::test_experts", "experts in another order"),  # noqa: E501
    Fault("step07_moe_ep", "F.silu(self.gate_proj(rows, counts)) * self.up_proj(rows, counts)", "F.silu(self.up_proj(rows, counts)) * self.gate_proj(rows, counts)", "test_step07::test_experts", "silu of the wrong matrix"),  # noqa: E501
    Fault("step07_moe_ep", "ctx.coeff, dtype", "0.0, dtype", "test_step07::test_add_loss", "nothing spreads the tokens"),  # noqa: E501
    Fault("step07_moe_ep", "ctx.coeff, dtype", "2 * ctx.coeff, dtype", "test_step07::test_add_loss", "as where a layer's forward is done again: https://github.com/NVIDIA/Megatron-LM/issues/1330"),  # noqa: E501
    Fault("step07_moe_ep", "grad.new_full((), ctx.coeff, dtype=wide(grad.dtype))", "ctx.coeff * grad.sum()", "test_step07::test_add_loss", "the loss's weight times dy"),  # noqa: E501
    Fault("step07_moe_ep", " * config.micro_batch_size / config.global_batch_size", "", "test_step07::test_a_layer_is_its_definition", "its strength grows with accumulation"),  # noqa: E501
    Fault("step07_moe_ep", "all_reduce(counts_E, self.group).wait()", "pass", "test_step07::test_aux_loss", "f of a rank's own tokens"),  # noqa: E501
    Fault("step07_moe_ep", "all_reduce(counts_E, self.group).wait()", "all_reduce(counts_E, self.group)", "test_step07::test_aux_loss", "nobody waits for the counts"),  # noqa: E501
    Fault("step07_moe_ep", "num_tokens_per_expert_E.clone()", "num_tokens_per_expert_E", "test_step07::test_aux_loss", "counts summed in place: the experts' are gone"),  # noqa: E501
    Fault("step07_moe_ep", "/ n_tokens", "/ len(p_TE)", "test_step07::test_aux_loss", "P of own tokens"),
    Fault("step07_moe_ep", "len(f_E) * (f_E", "(f_E", "test_step07::test_a_layer_is_mixtrals", "balance E times too weak"),  # noqa: E501
    Fault("step07_moe_ep", "transpose_blocks(out_RD, arriving_Ge.T)", "out_RD", "test_step07::test_dispatch_and_combine", "returned in another order"),  # noqa: E501
    Fault("step07_moe_ep", "return transpose_blocks(received_RD, arriving_Ge)", "return received_RD", "test_step07::test_dispatch_and_combine", "not sorted by expert"),  # noqa: E501
    Fault("step07_moe_ep", "sorted_ND.contiguous(), group, in_rows, out_rows).wait()", "sorted_ND.contiguous(), group, in_rows, out_rows)", "test_step07::test_dispatch_and_combine", "nobody waits for what arrives: https://github.com/deepspeedai/DeepSpeed/issues/8061"),  # noqa: E501
    Fault("step07_moe_ep", "arriving_Ge.T), group, in_rows, out_rows).wait()", "arriving_Ge.T), group, in_rows, out_rows)", "test_step07::test_dispatch_and_combine", "nobody waits for what comes home"),  # noqa: E501
    Fault("step07_moe_ep", "all_to_all(arriving_Ge, leaving_Ge, group).wait()", "all_to_all(arriving_Ge, leaving_Ge, group)", "test_step07::test_visit_experts", "nobody waits for the counts"),  # noqa: E501
    Fault("step07_moe_ep", "group, there, home)\n", "group, there, there)\n", "test_step07::test_visit_experts", "backward sends as forward"),  # noqa: E501
    Fault("step07_moe_ep", "group, there, home)\n", "group, there, lambda dx, g: home(dx, g) / 2)\n", "test_step07::test_visit_experts", "gradients of rows averaged over ep"),  # noqa: E501
    Fault("step07_moe_ep", "group, home, there)\n", "group, home, lambda dx, g: there(dx, g) * g.size)\n", "test_step07::test_visit_experts", "experts' gradients ep times too large (Adam hides it): https://github.com/deepspeedai/DeepSpeed/pull/6546"),  # noqa: E501
    Fault("step07_moe_ep", "experts(rows_RD, arriving_Ge.sum(0))", "experts(rows_RD, leaving_Ge[group.rank] * len(rows_RD) // max(1, len(rows_RD)))", "test_step07::test_visit_experts", "experts are told this rank's counts"),  # noqa: E501
    Fault("step07_moe_ep", '"sequence", "cp", "tp"', '"sequence", "cp"', "test_step07::test_groups", "f without the tokens that the other tp ranks have"),  # noqa: E501
    Fault("step07_moe_ep", 'data_dim="expert_data"', 'data_dim="data"', "test_step07::test_groups", "experts summed with other experts"),  # noqa: E501
    Fault("step07_moe_ep", 'partial_over=("tp",)', "partial_over=()", "test_step07::test_groups", "the router is not summed over tp, copies part: https://github.com/pytorch/torchtitan/issues/2387"),  # noqa: E501
    Fault("step07_moe_ep", 'partial_over=("tp",)', 'partial_over=("tp",) if config.sp else ()', "test_step07::test_experts_train_to_step_1s_numbers", "the same without SP alone: https://github.com/NVIDIA/Megatron-LM/pull/619"),  # noqa: E501
    Fault("step07_moe_ep", "if tp.size > 1 and not config.sp:", "if False:", "test_step07::test_experts_train_to_step_1s_numbers", "without SP all tp ranks route the same tokens, and the router's gradient is summed"),  # noqa: E501
    Fault("step07_moe_ep", "config.dense_layers + ", "", "test_step07::test_which_layers_have_experts", "dense layers forgotten"),  # noqa: E501
    Fault("step07_moe_ep", 'mesh.enter("ep", grid)', 'mesh.enter("ep", grid.reshape(ep, -1).T)', "test_step07::test_groups", "ep over ranks that are no neighbours"),  # noqa: E501
    Fault("step07_moe_ep", 'shard_param(linear.weight, 0, mesh["ep"])', "linear.weight", "test_step07::test_groups", "each rank keeps all experts"),  # noqa: E501
    Fault("step07_moe_ep", "ranks % ep:", "ranks * ep > mesh.world:", "test_step07::test_groups", "ep must divide the ranks of a stage"),  # noqa: E501
    Fault("step07_moe_ep", "config.experts_per_token > config.experts:", "False:", "test_step07::test_a_mistake_is_one_line", "more experts a token than there are"),  # noqa: E501
    Fault("step07_moe_ep", "n_targets = (targets != IGNORE)", 'n_targets = mesh["dp"].size * (targets[mine] != IGNORE)', "test_step07::test_experts_train_to_step_1s_numbers", "each rank divides by its own targets: https://github.com/pytorch/torchtitan/pull/2206"),  # noqa: E501
    Fault("step07_moe_ep", "learning_rate(step, config)", 'learning_rate(step * mesh["dp"].size, config)', "test_step07::test_experts_train_to_step_1s_numbers", "the schedule runs faster with ranks: https://github.com/huggingface/accelerate/issues/662"),  # noqa: E501
    Fault("step07_moe_ep", "        sum_partial_gradients(model, optimizer.gradients(), mesh)  # over tp: of norms (SP) and routers\n", "", "test_step07::test_experts_train_to_step_1s_numbers", "routers and norms are not summed over tp"),  # noqa: E501
    Fault("step07_moe_ep", '        sum_tied(model, optimizer.gradients(), mesh["pp"], places)', "        pass", "test_step07::test_experts_train_to_step_1s_numbers", "a tied matrix's two gradients stay apart: https://github.com/uw-syfi/piper/issues/13"),  # noqa: E501
    Fault("step07_moe_ep", "norm = global_norm(model, optimizer.gradients(), mesh, sharded=config.zero > 0)", "norm = global_norm(model, optimizer.gradients(), mesh)", "test_step07::test_experts_train_to_step_1s_numbers", "ZeRO's shards are counted as copies"),  # noqa: E501
    Fault("step07_moe_ep", '        all_reduce(loss, mesh["data"]).wait()\n', "", "test_step07::test_experts_train_to_step_1s_numbers", "the loss of a rank's own tokens is shown"),  # noqa: E501
    Fault("step07_moe_ep", "        optimizer.zero_grad()\n", "", "test_step07::test_experts_train_to_step_1s_numbers", "gradients of all steps add up"),  # noqa: E501
    Fault("common.comm", "out_rows, in_rows, group=group.handle", "in_rows, out_rows, group=group.handle", "test_step07::test_dispatch_and_combine", "rows that leave taken for rows that arrive"),  # noqa: E501
    Fault("common.comm", 'note("all_to_all", group, tensor, 1 - stays)', 'note("all_to_all", group, tensor, 1.0)', "test_step07::test_law_of_bytes", "rows that stay are counted as sent"),  # noqa: E501
]
