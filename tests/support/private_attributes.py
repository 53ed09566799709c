"""Attributes of torch's objects that the files of `torch_private` use, and whether this torch has them.

`python -m aot_hooks env` lists private symbols, which a path names. An attribute of an instance has no path, so these
are listed here by hand: by the file that uses them, and the class or module that has them. Many are read with a
default, so a torch without one would change what is done and raise nothing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re

from cudagraph.torch_private.symbols import has, resolve

# `old|new` is an attribute that torch has renamed; of `__name__` only the name of the class counts.
ATTRIBUTES: dict[str, dict[str, str]] = {
    "aot_hooks/torch_private/aot.py": {
        "torch._inductor.output_code.OutputCode": "prepare_for_serialization post_compile set_triton_bundle",
        "torch._guards.TracingContext": "try_get fakify_first_call",
        "torch._functorch._aot_autograd.schemas.ViewAndMutationMeta": "bw_donated_idxs input_info",
        "torch._functorch._aot_autograd.schemas.InputAliasInfo": "mutates_data mutates_storage_metadata",
    },
    "aot_hooks/torch_private/aot_cache.py": {
        "torch._functorch._aot_autograd.schemas.AOTConfig": "aot_autograd_arg_pos_to_source",
        "torch._functorch._aot_autograd.autograd_cache": (
            "should_use_local_autograd_cache should_use_remote_autograd_cache"
        ),
    },
    "aot_hooks/torch_private/autograd.py": {
        "torch._C._autograd.SavedTensor": "data",
        "torch.autograd.graph.Node": "_input_metadata _sequence_nr",
        "torch._C._FunctionBase": "_input_metadata _sequence_nr",
        "torch.autograd.function.BackwardCFunction": "_forward_cls",
        "torch._dynamo.compiled_autograd": "in_compiled_autograd_region",
        "torch._C._autograd": "SavedTensor",
    },
    "aot_hooks/torch_private/dry_run.py": {
        "torch._subclasses.fake_tensor.FakeTensorMode": "from_tensor allow_non_fake_inputs",
        "torch._subclasses.fake_tensor.FakeTensor": "fake_mode",
        "torch._subclasses.fake_tensor": "FakeTensor",
    },
    "aot_hooks/torch_private/dynamo.py": {
        "torch._C._dynamo.eval_frame._CacheEntry": "guard_manager backend",
        "torch._dynamo.guards.GuardManagerWrapper": "extra_state",
        "torch._C._dynamo.eval_frame._ExtraState": "invalidate",
        "torch._dynamo.cache_size.CacheSizeRelevantForFrame": "num_cache_entries_with_same_id_matched_objs",
        "torch._dynamo.exc.BackendCompilerFailed": "remove_dynamo_frames",
        "torch._TorchCompileWrapper": "compiler_name compiler_fn kwargs",
        "torch._dynamo.convert_frame.CatchErrorsWrapper": "_torchdynamo_orig_backend",
        "torch._dynamo.eval_frame.OptimizedModule": "dynamo_ctx",
        "torch._dynamo.eval_frame._TorchDynamoContext": "callback",
        "torch.nn.Module": "_compiled_call_impl",
    },
    "aot_hooks/torch_private/dynamo_backends.py": {
        "torch._dynamo.convert_frame.CatchErrorsWrapper": "_torchdynamo_orig_backend hooks",
        "torch._dynamo.convert_frame.ConvertFrame": "_clone_with_backend _inner_convert",
        "torch._dynamo.convert_frame.ConvertFrameAssert": "_clone_with_backend _package",
        "torch._TorchCompileInductorWrapper": "config get_compiler_config reset",
        "torch._dynamo.eval_frame": "_callback_from_stance",
    },
    "aot_hooks/torch_private/dynamo_guards.py": {
        "torch._dynamo.eval_frame.OptimizeContext": "fullgraph",
        "torch._dynamo.output_graph.OutputGraph": "global_scope random_calls variable_tracker_cache",
        "torch._guards.TracingContext": "try_get guards_context",
        "torch._guards.GuardsContext": "dynamo_guards",
        "torch._guards.Guard": "originating_source",
        "torch._dynamo.source.AttrSource": "name base member",
        "torch._dynamo.source.GetItemSource": "base index",
        "torch._dynamo.source.GlobalSource": "name global_name",
        "torch._dynamo.variables.builder.GraphArg": "source",
    },
    "aot_hooks/torch_private/dynamo_trace.py": {
        "torch._dynamo.comptime.ComptimeContext": "get_local _i_will_not_complain_if_bc_breaks_InstructionTranslator",
        "torch._dynamo.comptime.ComptimeVar": "_i_will_not_complain_if_bc_breaks_VariableTracker",
        "torch._dynamo.symbolic_convert.InstructionTranslator": "output",
        "torch._dynamo.output_graph.OutputGraph": "side_effects root_tracer current_tracer global_scope",
        "torch._dynamo.output_graph.SubgraphTracer": "graph source_fn_stack",
        "torch._dynamo.side_effects.SideEffects": "id_to_variable store_attr_mutations is_modified load_cell",
        "torch._dynamo.variables.base.VariableTracker": (
            "source realize mutation_type python_type as_python_constant var_getattr|tp_getattro_impl"
        ),
        "torch._dynamo.variables.base.AttributeMutationNew": "__name__",
        "torch._dynamo.variables.base.AttributeMutationExisting": "__name__",
        "torch._dynamo.variables.base.ValueMutationExisting": "__name__",
        "torch._dynamo.variables.misc.NewGlobalVariable": "__name__",
        "torch._dynamo.variables.misc.CellVariable": "__name__",
        "torch._dynamo.variables.lists.TupleVariable": "items",
        "torch._dynamo.variables.dicts.ConstDictVariable": "items",
        "torch._dynamo.variables.user_defined.UserDefinedObjectVariable": "value",
        "torch._dynamo.variables.tensor.SymNodeVariable": "sym_num",
        "torch._dynamo.variables.functions.UserMethodVariable": "fn obj|im_self",
        "torch._dynamo.variables.functions.NestedUserFunctionVariable": (
            "closure f_globals fn_name get_code defaults kwdefaults"
        ),
        "torch._dynamo.variables.functions.FunctoolsPartialVariable": "func args keywords",
        "torch._dynamo.variables.builder.GraphArg": "example fake_tensor",
        "torch._subclasses.fake_tensor.FakeTensor": "_version",
        "torch._dynamo.source.GlobalSource": "name make_guard",
        "torch._dynamo.guards.GuardBuilder": "get_guard_manager",
        "torch._guards.Guard": "user_stack",
        "torch._C._dynamo.guards.GuardManager": "add_lambda_guard",
    },
    "aot_hooks/torch_private/inductor.py": {
        "torch._inductor.virtualized._V": "set_choices_handler graph",
        "torch._inductor.config": "custom_partitioner_fn fallback_random",
    },
    "aot_hooks/torch_private/inductor_fusion.py": {
        "torch._inductor.choices.InductorChoices": "can_fuse should_use_persistent_reduction triton_kernel_kwargs",
        "torch._inductor.codegen.simd_kernel_features.SIMDKernelFeatures": (
            "reduction_nodes get_reduction_hint numel reduction_numel"
        ),
        "torch._inductor.graph.GraphLowering": "sizevars graph_inputs get_dep_size_hint",
        "torch._inductor.sizevars.SizeVarAllocator": "statically_known_leq",
        "torch._inductor.dependencies.MemoryDep": "name size num_vars normalize",
        "torch._inductor.dependencies.ReadWrites": "reads_and_writes",
        "torch._inductor.custom_graph_pass.CustomGraphPass": "uuid",
        "torch._inductor.ir.IRNode": "origins",
        "torch._inductor.scheduler.BaseSchedulerNode": (
            "node scheduler read_writes get_nodes get_name get_buffer_names is_extern is_template add_fake_dep"
        ),
        "torch._inductor.scheduler.SchedulerNode": "refresh_dependencies",
        "torch._inductor.scheduler.Scheduler": "nodes topological_sort_schedule compute_ancestors",
        "torch._inductor.ir.FallbackKernel": "op_overload",
        "torch._inductor.config": "_pre_fusion_custom_pass",
    },
    "aot_hooks/torch_private/inductor_lowering.py": {
        "torch._inductor.graph.GraphLowering": "unaligned_buffers never_reuse_buffers current_node",
        "torch._inductor.ir.TensorBox": "get_name realize get_size get_device make_loader",
        "torch._inductor.ir.Pointwise": "create",
        "torch._inductor.sizevars.SizeVarAllocator": "statically_known_equals",
    },
    "aot_hooks/torch_private/values.py": {
        "torch._guards.TracingContext": "try_get fake_mode",
        "torch._subclasses.fake_tensor.FakeTensor": "constant",
        "torch._subclasses.fake_tensor.FakeTensorMode": "allow_non_fake_inputs shape_env",
        "torch.fx.experimental.symbolic_shapes.ShapeEnv": "pending_fresh_unbacked_symbols bound_sympy",
        "torch.fx.experimental.sym_node.SymNode": "expr hint has_hint shape_env",
        "torch._ops.OpOverload": "_schema",
    },
    "cudagraph/torch_private/autograd_cache.py": {
        "torch._functorch._aot_autograd.autograd_cache.GenericAOTAutogradResult": (
            "compiled_fw compiled_bw runtime_metadata maybe_subclass_meta"
        ),
        "torch._functorch._aot_autograd.autograd_cache.CompiledForward": "post_compile",
        "torch._functorch._aot_autograd.autograd_cache.CompiledBackward": "post_compile backward_state_indices",
        "torch._functorch._aot_autograd.schemas.SubclassMeta": "fw_metadata",
        "torch._functorch._aot_autograd.schemas.AOTConfig": "static_input_indices",
        "torch._functorch._aot_autograd.autograd_cache": "autograd_cache_key",
        "torch._functorch._aot_autograd.autograd_cache.AOTAutogradCache": "_lookup iterate_over_candidates",
        "torch._functorch.config": "enable_autograd_cache",
    },
    "cudagraph/torch_private/cache_contents.py": {
        "torch._library.custom_ops.CustomOpDef": "_backward_fn _torch_dispatch_fns",
    },
    "cudagraph/torch_private/compilers.py": {
        "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
        "torch._dynamo.eval_frame._TorchDynamoContext": "_torchdynamo_orig_callable",
        "torch._dynamo.eval_frame.DisableContext": "_torchdynamo_orig_callable",
        "torch._functorch._aot_autograd.schemas.ViewAndMutationMeta": (
            "static_input_indices input_info num_forward subclass_inp_meta subclass_fw_graph_out_meta "
            "num_outputs_aliased num_intermediate_bases dynamic_outputs tokens is_rng_op_functionalized "
            "num_graphsafe_rng_states grad_enabled_mutation"
        ),
        "torch._functorch._aot_autograd.schemas.InputAliasInfo": (
            "mutates_data mutates_metadata mutates_storage_metadata"
        ),
        "torch._inductor.output_code.CompiledFxGraph": (
            "current_callable mutated_input_idxs constants partition_maps disabled_cudagraphs_reason "
            "compiled_fn_runner inputs_to_check fx_kwargs _fx_graph_cache_key _fx_graph_cache_debug_lines "
            "_time_taken_ns guards_expr"
        ),
        "torch._inductor.utils.GraphPartitionMap": "input_index_mapping output_index_mapping",
        "torch._functorch.config": "cse",
        "torch._dynamo.eval_frame": "_callback_from_stance",
    },
    "cudagraph/torch_private/cuda.py": {
        "torch.Tensor": "_backward_hooks _post_accumulate_grad_hooks",
        "torch.amp.GradScaler": "_per_optimizer_states",
        "torch.UntypedStorage": "_cdata",
        "torch._ops.OpOverload": "_schema",
        "torch._inductor.cudagraph_trees.MarkStepBox": "mark_step_counter",
        "torch._dynamo.mutation_guard.GenerationTracker": "generation",
        "torch.autograd.function.BackwardCFunction": "_raw_saved_tensors",
    },
    "cudagraph/torch_private/damaged_entries.py": {
        "torch._inductor.codecache.GuardedCache": "_get_tmp_dir_for_key iterate_over_candidates",
        "torch._inductor.output_code.CompiledFxGraph": "cache_key source_code",
        "torch._functorch._aot_autograd.autograd_cache.GenericAOTAutogradResult": "compiled_fw compiled_bw",
    },
    "cudagraph/torch_private/distributed.py": {
        "torch.distributed.ProcessGroup": "_device_types _get_backend",
        "torch.distributed.distributed_c10d._World": "comms",
        "torch._C._distributed_c10d.Backend": "_get_sequence_number_for_group abort",
        "torch.distributed.tensor.DTensor": "_local_tensor __tensor_flatten__ __tensor_unflatten__",
        "torch.distributed.fsdp.FSDPModule": "_get_fsdp_state",
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState": (
            "_comm_ctx _state_ctx _training_state _fsdp_param_group|_fsdp_param_groups _modules_to_run_forward"
        ),
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPStateContext": (
            "iter_forward_root post_backward_final_callback_queued post_optim_event"
        ),
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPCommContext": (
            "all_gather_state post_forward_order reduce_scatter_state|reduce_scatter_states"
        ),
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup": (
            "fsdp_params _all_gather_result _post_reduce_event _all_reduce_state _reshard_after_forward_event "
            "_partial_reduce_output _post_forward_indices _training_state _to_sharded comm_ctx wait_for_unshard"
        ),
        "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam": (
            "all_gather_outputs _sharded_param_data unsharded_accumulated_grad _unsharded_param "
            "_unsharded_inner_tensors"
        ),
        "torch.nn.parallel.DistributedDataParallel": (
            "_get_ddp_logging_data _set_ddp_runtime_logging_sample_rate _build_params_for_reducer "
            "_build_debug_param_to_name_mapping _ddp_init_helper"
        ),
        "torch.distributed.Reducer": "_reset_state _remove_autograd_hooks _set_static_graph",
        "torch.distributed.Logger": "_set_static_graph _set_comm_hook_name",
    },
}


def has_attribute(owner: str, name: str) -> bool:
    """Whether instances of the class at `owner`, or the module there, have an attribute; `name` may be several,
    `old|new`.

    Attributes that methods use of `self`, or set on an object that they make, are found in the source of the class.
    """
    if not has(owner):
        return False
    found = resolve(owner)
    names = _names_in_source(found) if isinstance(found, type) else frozenset()
    return any(hasattr(found, each) or each in names for each in name.split("|"))


@functools.cache
def _names_in_source(cls: type) -> frozenset[str]:
    """The attribute names that the classes of `cls` annotate, or whose methods read or set them."""
    names: set[str] = set()
    for base in cls.__mro__[:-1]:
        names.update(vars(base).get("__annotations__", ()))
        with contextlib.suppress(OSError, TypeError):  # written in C++
            names.update(re.findall(r"\b(?:self\.|\w+\.(?=\w+ = ))(\w+)", inspect.getsource(base)))
    return frozenset(names)
