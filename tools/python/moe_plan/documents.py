"""The documents of the verbs as dataclasses. Written by tools/python/make_documents.py from docs/schemas; a test holds it to them."""
from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from .document import Document


@dataclass(kw_only=True, repr=False)
class SearchAssumptions(Document):
    """What hours, dollars and goodput rest on; where --price, --mtbf, --tokens or --deadline or several numbers of
    GPUs are given"""

    tokens: float
    """Tokens to train on; a trillion without --tokens [tokens]"""

    price: float | None
    """Of a GPU-hour [dollars]"""

    deadline_hours: float | None
    """For those tokens [h]"""

    mtbf_hours: float | None
    """Mean time between failures of one GPU; null: failures are left out [h]"""

    checkpoint_interval: Literal["daly", "given"] | None
    """Daly: the best interval of each plan by Daly 2006; given: --checkpoint-interval; null without failures"""

    storage_bytes_per_second: float | None
    """Of each GPU while all write a checkpoint; null without failures [bytes/s]"""

    restart_seconds: float | None
    """From a failure until training goes on; null without failures [s]"""


@dataclass(kw_only=True, repr=False)
class SearchCount(Document):
    """One number, and its plan of fewest GPU-hours"""

    gpus: int
    """The number [GPUs]"""

    no_plan: str | None
    """Why it has no plan; null where it has one"""

    hours: float | None
    """Of that plan; null without one [h]"""

    gpu_hours: float | None
    """Of that plan; null without one [GPU-hours]"""

    dollars: float | None
    """Of that plan; null without one, and without a price [dollars]"""


@dataclass(kw_only=True, repr=False)
class Quantiles(Document):
    """The figure at the mean, the median and the 99th percentile of the steps"""

    mean: float
    """At the mean [as the figure]"""

    p50: float
    """At the median [as the figure]"""

    p99: float
    """At the 99th percentile [as the figure]"""


@dataclass(kw_only=True, repr=False)
class Replication(Document):
    """What copies of hot experts in spare slots of other ranks would give; null where nothing would be copied"""

    spare_experts: int
    """Slots of each rank for copies [experts]"""

    load: Quantiles
    """Load over the mean that is left"""

    copies: float
    """Copies of a layer and micro-batch, mean over draws [experts]"""

    copies_of_one_rank: float
    """Of them, from the rank that sends most [experts]"""

    plan_seconds: float
    """Planning the copies of a layer and micro-batch [s]"""

    weight_seconds: float
    """Sending their weights, before the forward and before the backward [s]"""

    gradient_seconds: float
    """Reducing their gradients [s]"""

    exposed_gradient_seconds: float
    """Of it, longer than the layer's other backward takes [s]"""

    added_seconds: float
    """Of the step, for all that [s]"""

    slots_gib: float
    """Weights and gradients of a rank's slots [GiB]"""

    step_seconds: float
    """One optimizer step [s]"""

    tflops_per_gpu: float
    """Model FLOPs of a second on one GPU; recomputation not counted [TFLOP/s]"""

    memory_gib: float
    """Peak of the rank that needs most, with context and communicators [GiB]"""

    fits: bool
    """Whether that is within the hardware's memory"""

    share_of_balanced: float
    """Rate over that with balanced routing [fraction]"""


@dataclass(kw_only=True, repr=False)
class PlanWorkload(Document):
    """What a step trains on"""

    seq: int
    """Tokens per sequence [tokens]"""

    gbs: int
    """Global batch: sequences per step [sequences]"""

    routing: str | None = None
    """Tokens over experts: balanced, dirichlet:A, zipf:S, or a histogram's path"""

    lengths: str | None = None
    """Lengths of masked documents, for FLOPs and times: LENGTH:DOCUMENTS joined by +"""


@dataclass(kw_only=True, repr=False)
class PlanMesh(Document):
    """Gpus = tp cp dp pp = etp ep edp pp"""

    gpus: int
    """Ranks of the job [GPUs]"""

    tp: int
    """Tensor parallelism of dense layers"""

    cp: int
    """Context parallelism"""

    dp: int
    """Data parallelism of dense layers"""

    pp: int
    """Pipeline parallelism"""

    vpp: int
    """Model chunks of a pipeline rank"""

    ep: int
    """Expert parallelism"""

    etp: int
    """Tensor parallelism of experts"""

    edp: int
    """Data parallelism of experts; follows from the others"""

    rank_order: str | None = None
    """Axes from the one that varies fastest"""


@dataclass(kw_only=True, repr=False)
class PlanRouter(Document):
    """How the router is trained; left out where all is at its default"""

    load_balancing: Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn"] | None = None
    """Tokens over which aux_loss wants experts equally loaded; sinkhorn: the choice is balanced instead"""

    aux_loss: float | None = None
    """Coefficient of the balancing loss"""

    z_loss: float | None = None
    """Coefficient of the z-loss"""

    input_jitter: float | None = None
    """Noise in 1 - input_jitter to 1 + input_jitter on the router's input, in training alone"""

    bias_update: float | None = None
    """Step of the selection bias per optimizer step"""

    forced: bool | None = None
    """Experts evenly loaded whatever the router says; for benchmarks"""

    expert_capacity: float | None = None
    """Rows that an expert takes over the balanced load; 0: none are dropped"""

    drop_policy: Literal["probs", "position"] | None = None
    """Which rows are dropped: those of the lowest weight, or the last"""

    drop_scope: Literal["sub_sequence", "full_sequence"] | None = None
    """Tokens that compete for an expert's capacity: a rank's part of its sequences, or each whole sequence"""

    pad_to_capacity: bool | None = None
    """Every expert gets exactly expert_capacity rows"""


@dataclass(kw_only=True, repr=False)
class PlanIndexer(Document):
    """How indexers of sparse attention are trained; left out where all is at its default"""

    loss: float | None = None
    """Coefficient of the indexers' loss; 0: they are not trained"""

    stage: Literal["sparse", "dense_loss", "warm_up"] | None = None
    """Keys of attention and of that loss: those picked, of the loss all, or of both all and nothing else is trained"""


@dataclass(kw_only=True, repr=False)
class HardwarePeakFlops(Document):
    """Dense rate by precision; a missing one cannot be run"""

    fp32: float | None = None
    """Products in fp32 [FLOP/s]"""

    bf16: float | None = None
    """Products in bf16 [FLOP/s]"""

    fp8_tensor: float | None = dataclasses.field(default=None, metadata={"json": "fp8-tensor"})
    """Products in fp8-tensor [FLOP/s]"""

    fp8_blockwise: float | None = dataclasses.field(default=None, metadata={"json": "fp8-blockwise"})
    """Products in fp8-blockwise [FLOP/s]"""

    mxfp8: float | None = None
    """Products in mxfp8 [FLOP/s]"""

    nvfp4: float | None = None
    """Products in nvfp4 [FLOP/s]"""


@dataclass(kw_only=True, repr=False)
class HardwarePcie(Document):
    """Link between the NVLink domains of a node, required where gpus_per_node exceeds nvlink_domain"""

    bandwidth: float
    """One way per GPU [bytes/s]"""

    latency: float
    """Per message [s]"""


@dataclass(kw_only=True, repr=False)
class HardwareNvlink(Document):
    """Link inside of a domain"""

    bandwidth: float
    """One way per GPU [bytes/s]"""

    latency: float
    """Per message [s]"""


@dataclass(kw_only=True, repr=False)
class HardwareNic(Document):
    """Network link of one GPU"""

    bandwidth: float
    """One way per GPU [bytes/s]"""

    latency: float
    """Per message [s]"""

    message: float | None = None
    """Of which each message of an exchange holds the link, beside its bytes [s]"""


@dataclass(kw_only=True, repr=False)
class HardwareHost(Document):
    """Link between a GPU and its host"""

    bandwidth: float
    """One way per GPU [bytes/s]"""

    latency: float
    """Per message [s]"""


@dataclass(kw_only=True, repr=False)
class HardwareCommunicatorBytes(Document):
    """Memory that communicators take of a GPU: one number for any, or by use"""

    first: float
    """The first communicator takes so much more [bytes]"""

    first_pairwise: float | None = None
    """And the first whose members send to each other [bytes]"""

    collective: float | list[list[Any]]
    """Of a communicator for collectives: one number, or rows [members, bytes] [bytes]"""

    pairwise: float | list[list[Any]]
    """Of one whose members also send to each other, likewise [bytes]"""

    messages: float
    """Of one for messages of a pipeline [bytes]"""


@dataclass(kw_only=True, repr=False)
class HardwareCard(Document):
    """One card"""

    measured_by: str
    """Date, machine and command of its measurement"""

    factors: dict[str, float]
    """By family of `measured`: what the card takes over the mean of all"""


@dataclass(kw_only=True, repr=False)
class Hardware(Document):
    """A machine to plan for: one accelerator, its node, its links, and what was measured on it."""

    schema: Literal["moe-plan/hardware/1"] | None = None
    """Name and version of this schema"""

    name: str
    """Name of the machine"""

    base: str | None = None
    """Profile of profiles/hardware that this one differs from; only differences are stated"""

    vendor: str | None = None
    """GPU only: who makes it"""

    compute_capability: float | None = None
    """GPU only: CUDA's; default: 10.0 with a rate for MXFP8 or NVFP4, else 9.0 with one for FP8, else 8.0"""

    cpu: bool | None = None
    """Ranks are threads that share `cores`; left out on GPUs"""

    cores: int | None = None
    """CPU only: cores of the machine, 0 = those of the machine that reads the file [cores]"""

    sm_count: int | None = None
    """GPU only: multiprocessors [SMs]"""

    peak_flops: HardwarePeakFlops | None = None
    """Dense rate by precision; a missing one cannot be run"""

    memory_bytes: float | None = None
    """Memory of one GPU that a job can use, before the constants below; CPU: 0 = ask the machine [bytes]"""

    memory_bandwidth: float | None = None
    """Of that memory [bytes/s]"""

    nvlink_domain: int | None = None
    """GPUs that reach each other over NVLink [GPUs]"""

    nvlink_domain_used: int | None = None
    """Of them, how many a job uses; default: all [GPUs]"""

    gpus_per_node: int | None = None
    """GPUs of one host; default: nvlink_domain up to 8, else 4 [GPUs]"""

    pcie: HardwarePcie | None = None
    """Link between the NVLink domains of a node, required where gpus_per_node exceeds nvlink_domain"""

    nvlink: HardwareNvlink | None = None
    """Link inside of a domain"""

    nic: HardwareNic | None = None
    """Network link of one GPU"""

    host: HardwareHost | None = None
    """Link between a GPU and its host"""

    host_memory_bytes: float | None = None
    """Host memory, one GPU's share, for offloaded tensors; 0 = not known, no limit [bytes]"""

    context_bytes: float | None = None
    """CUDA context and library workspaces on a GPU [bytes]"""

    communicator_bytes: float | HardwareCommunicatorBytes | None = None
    """Memory that communicators take of a GPU: one number for any, or by use [bytes]"""

    default_stack: str | None = None
    """Stack that search takes unless told"""

    like: str | None = None
    """Machine whose figures in a stack apply; default: by name and precisions"""

    source: str | list[str] | None = None
    """Where the figures come from"""

    measured: dict[str, list[list[float]]] | None = None
    """Calls of a family of ops: rows [work, seconds, sides..]; work is FLOPs or bytes"""

    measured_clocks: dict[str, list[float]] | None = None
    """Clock that the GPU reported while the calls of a family were measured, by the rows of `measured`; 0 = not
    known"""

    product_tiles: dict[str, list[list[float]]] | None = None
    """Tiles: rows [SMs, down, across, depth, step cycles, tile cycles, swapped]"""

    measured_by: str | None = None
    """Date, machine and command of the measurement"""

    cards: list[HardwareCard] | None = None
    """Cards of one kind whose calls are averaged in `measured`; absent in profiles of one card"""


@dataclass(kw_only=True, repr=False)
class Plan(Document):
    """Every choice for a run, with its model and hardware inside."""

    schema: Literal["moe-plan/plan/1"] | None = None
    """Name and version of this schema"""

    schema_version: Literal[1]
    """Version once more; plans from before `schema` have it alone"""

    stack: str
    """Software generation that runs the plan; moe-plan is what execute runs"""

    workload: PlanWorkload
    """What a step trains on"""

    mesh: PlanMesh
    """Gpus = tp cp dp pp = etp ep edp pp"""

    router: PlanRouter | None = None
    """How the router is trained; left out where all is at its default"""

    indexer: PlanIndexer | None = None
    """How indexers of sparse attention are trained; left out where all is at its default"""

    mbs: int
    """Micro-batch [sequences]"""

    schedule: Literal["1f1b", "interleaved", "zero-bubble", "zb-v", "dualpipe-v"]
    """Pipeline schedule"""

    layout: str | None = None
    """Megatron's layout string; empty: stages as even as possible"""

    precision: Literal["fp32", "bf16", "fp8-tensor", "fp8-blockwise", "mxfp8", "nvfp4"]
    """Of linear layers"""

    attention_precision: Literal["fp32", "bf16", "fp8-tensor", "fp8-blockwise", "mxfp8", "nvfp4"] | None = None
    """Of attention's core; default: not quantized"""

    expert_precision: Literal["fp32", "bf16", "fp8-tensor", "fp8-blockwise", "mxfp8", "nvfp4"] | None = None
    """Of experts; default: as precision"""

    head_precision: Literal["fp32", "bf16", "fp8-tensor", "fp8-blockwise", "mxfp8", "nvfp4"] | None = None
    """Of the LM head; default: not quantized"""

    bf16_layers: list[int] | None = None
    """Decoder layers at the start and at the end that stay in BF16 [layers]"""

    fp8_scaling: Literal["current", "delayed"] | None = None
    """Scales of fp8-tensor: of this tensor, or of its history"""

    fp8_wgrad: bool | None = None
    """Of the stack moe-plan in fp8-blockwise or fp8-tensor: weight gradients multiply in FP8, too"""

    gradients: Literal["fp32", "bf16"] | None = None
    """Format in which gradients are summed and reduced"""

    recompute: list[Literal["layernorm", "core_attn", "mla_up_proj", "moe_act", "mlp", "shared_experts", "moe", "full", "operators"]] | None = None
    """Modules whose forward runs again in the backward pass"""

    offload: list[Literal["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act", "optimizer", "optimizer_step"]] | None = None
    """Modules whose inputs wait in host memory; optimizer: its states; optimizer_step: the step as well"""

    optimizer: Literal["adamw", "adamw+bf16_moments", "adamw+fp8_exp_avg", "muon"] | None = None
    """AdamW with FP32, BF16 or, of exp_avg, FP8 moments, or Muon for the matrices of layers"""

    lora: str | None = None
    """RANK:ALPHA:TARGETS of low-rank adapters, beside which every weight is frozen"""

    fsdp: bool | None = None
    """Weights, gradients and states sharded over data parallelism"""

    fsdp_replicas: int | None = None
    """HSDP: copies of the weights, each sharded over its part of data parallelism"""

    dispatcher: Literal["alltoall", "allgather", "deepep", "hybridep", "ncclep"] | None = None
    """How tokens travel to experts"""

    cp_comm: Literal["ring", "alltoall", "alltoall+ring"] | None = None
    """How context parallelism brings keys and queries together"""

    capacity: float | None = None
    """Planned rows over the balanced load; 0: the worst case"""

    paged_stash: bool | None = None
    """With a capacity: saved rows wait in pages"""

    memory_efficient_permutation: bool | None = None
    """Routing weights multiply before FC2"""

    tp_overlap: bool | None = None
    """Products pipelined with their collectives over TP"""

    ep_overlap: bool | None = None
    """Dispatch and combine hidden behind another micro-batch"""

    delay_wgrad: bool | None = None
    """Weight gradients wait for the next window of communication"""

    cuda_graph: str | None = None
    """None, partial, full, or scopes joined by +"""

    deterministic: bool | None = None
    """A step has the same bits every time"""

    documents: Literal["ignore", "mask"] | None = None
    """Whether attention, positions and loss stay within the documents of a sample"""

    model: dict[str, Any]
    """The model's config.json in full"""

    hardware: Hardware
    """The hardware profile in full"""


@dataclass(kw_only=True, repr=False)
class Breakdown(Document):
    """Exclusive seconds of the step on the rank that waits least; they add up to it"""

    compute: float
    """Computing, recomputation apart [s]"""

    recompute: float
    """Forward ops that run again for the backward pass [s]"""

    tensor: float
    """Communication of tensor parallelism with nothing computing beside it [s]"""

    context: float
    """The same of context parallelism [s]"""

    expert: float
    """The same of dispatch and combine [s]"""

    pipeline: float
    """The same of messages between pipeline stages [s]"""

    bubble: float
    """Waiting for other pipeline stages [s]"""

    data: float
    """Gradients and weights of data parallelism with nothing computing beside it [s]"""

    optimizer: float
    """The optimizer's update [s]"""

    host: float
    """Waiting for the host to issue ops [s]"""

    neighbours: float
    """What the residuals of runs nearby add to all others [s]"""


@dataclass(kw_only=True, repr=False)
class SearchPlanCheckpoint(Document):
    """Checkpoints and failures of the run; null where failures are left out"""

    gpu_bytes: float
    """Written by the GPU that writes most [bytes]"""

    write_seconds: float
    """For which training stops [s]"""

    interval_steps: int
    """Steps from one checkpoint to the next [steps]"""

    interval_seconds: float
    """Training in these steps [s]"""

    job_mtbf_hours: float
    """Mean time between failures of the job [h]"""


@dataclass(kw_only=True, repr=False)
class NeighboursRun(Document):
    """One run"""

    run_id: str
    """Its name"""

    error: float
    """Predicted / measured - 1 of that run by the cost model [fraction]"""

    weight: float
    """By which the logarithm of its error enters"""


@dataclass(kw_only=True, repr=False)
class Neighbours(Document):
    """How residuals of runs nearby correct the prediction; null where they do not"""

    factor: float
    """Corrected step seconds over those of the cost model; it is in all figures"""

    deviation: float
    """Standard deviation of the logarithm of what remains"""

    runs: list[NeighboursRun]
    """Runs that weigh most in it"""


@dataclass(kw_only=True, repr=False)
class DocumentSteps(Document):
    """Steps over samples of documents with drawn lengths; null where the plan masks no documents of known lengths"""

    step_seconds: Quantiles
    """Step time, s"""

    mean_length: float
    """Of a document [tokens]"""

    pairs: float
    """Pairs of query and key that documents leave of a sample's [fraction]"""

    steps: int
    """Steps that were drawn [steps]"""


@dataclass(kw_only=True, repr=False)
class SearchPlanNearestPublished(Document):
    """A run"""

    run_id: str
    """Name of the run in profiles/runs"""

    measured: float
    """Published rate [TFLOP/s per GPU]"""

    predicted: float
    """Rate predicted for it [TFLOP/s per GPU]"""

    differs_in: list[str]
    """Plan fields in which it differs"""


@dataclass(kw_only=True, repr=False)
class SearchPlan(Document):
    """A plan and its prediction"""

    plan: Plan
    """The plan as --out writes it"""

    tflops_per_gpu: float
    """Model FLOPs of a second on one GPU; recomputation not counted [TFLOP/s]"""

    tokens_per_second_per_gpu: float
    """Tokens of the global batch per second and GPU [tokens/s]"""

    step_seconds: float
    """One optimizer step [s]"""

    memory_gib: float
    """Peak of the rank that needs most, with context and communicators [GiB]"""

    fits: bool
    """Whether that is within the hardware's memory"""

    breakdown: Breakdown
    """Exclusive seconds of the step on the rank that waits least; they add up to it"""

    interval: list[float] | None
    """Low and high end of tflops_per_gpu at 80 %; null where nothing was measured"""

    goodput: float | None = None
    """Share of the run's time that trains and is not lost; this and what follows up to checkpoint is present with
    assumptions [fraction]"""

    hours: float | None = None
    """That the run takes for the tokens [h]"""

    gpu_hours: float | None = None
    """Hours times GPUs [GPU-hours]"""

    dollars: float | None = None
    """Cost of the tokens; null without a price [dollars]"""

    dollars_per_trillion_tokens: float | None = None
    """Cost of 1e12 tokens; null without a price [dollars]"""

    checkpoint: SearchPlanCheckpoint | None = None
    """Checkpoints and failures of the run; null where failures are left out"""

    neighbours: Neighbours | None
    """How residuals of runs nearby correct the prediction; null where they do not"""

    documents: DocumentSteps | None
    """Steps over samples of documents with drawn lengths; null where the plan masks no documents of known lengths"""

    equal_to_first: bool
    """The plan cannot be told apart from the first one by its prediction"""

    first_is_faster: float | None
    """Probability that the first plan is the faster one, failures counted where they are asked for; null for the
    first itself and where nothing is known [fraction]"""

    trains_differently: list[str]
    """Settings by which losses depend on the plan"""

    nearest_published: list[SearchPlanNearestPublished]
    """Published runs most like the plan, the most alike first"""


@dataclass(kw_only=True, repr=False)
class Search(Document):
    """The best plans of a request, ranked, and what the search looked at."""

    schema: Literal["moe-plan/search/1"]
    """Name and version of this schema"""

    gpus: int
    """GPUs of the first plan; with --gpus auto and no deadline the fewest for which there is a plan [GPUs]"""

    evaluated: int
    """Plans whose step was priced [plans]"""

    pruned: dict[str, int]
    """Plans that were excluded, by reason"""

    seconds: float
    """Wall time of the search [s]"""

    assumptions: SearchAssumptions | None = None
    """What hours, dollars and goodput rest on; where --price, --mtbf, --tokens or --deadline or several numbers of
    GPUs are given"""

    counts: list[SearchCount] | None = None
    """The numbers of GPUs that were searched; present with assumptions"""

    replication: Replication | None
    """What copies of hot experts would give the first plan; null where routing is balanced"""

    plans: list[SearchPlan]
    """The best plans, each of another mapping: the fastest first, with assumptions those of fewest GPU-hours"""


@dataclass(kw_only=True, repr=False)
class ReplayMemoryWeights(Document):
    """Weights"""

    gib: float
    """Bytes of the class [GiB]"""

    experts_gib: float
    """Of them, of experts [GiB]"""


@dataclass(kw_only=True, repr=False)
class ReplayMemoryGradients(Document):
    """Gradients"""

    gib: float
    """Bytes of the class [GiB]"""

    experts_gib: float
    """Of them, of experts [GiB]"""


@dataclass(kw_only=True, repr=False)
class ReplayMemoryOptimizer(Document):
    """Master weights and moments"""

    gib: float
    """Bytes of the class [GiB]"""

    experts_gib: float
    """Of them, of experts [GiB]"""


@dataclass(kw_only=True, repr=False)
class ReplayMemorySaved(Document):
    """Activations that wait for the backward pass"""

    gib: float
    """Bytes of the class [GiB]"""

    kept: int
    """Micro-batches whose activations are held at the peak [micro-batches]"""

    by_module_gib: dict[str, float]
    """The same by module"""


@dataclass(kw_only=True, repr=False)
class ReplayMemoryWorkspace(Document):
    """Tensors that live within a slot"""

    gib: float
    """Bytes of the class [GiB]"""


@dataclass(kw_only=True, repr=False)
class ReplayMemoryInputs(Document):
    """Tokens, labels and positions"""

    gib: float
    """Bytes of the class [GiB]"""


@dataclass(kw_only=True, repr=False)
class ReplayMemoryOutside(Document):
    """Context and communicators"""

    gib: float
    """Bytes of the class [GiB]"""


@dataclass(kw_only=True, repr=False)
class ReplayMemory(Document):
    """Memory of the fullest pipeline rank; the classes add up to memory_gib"""

    pipeline_rank: int
    """The rank that needs most [rank]"""

    weights: ReplayMemoryWeights
    """Weights"""

    gradients: ReplayMemoryGradients
    """Gradients"""

    optimizer: ReplayMemoryOptimizer
    """Master weights and moments"""

    saved: ReplayMemorySaved
    """Activations that wait for the backward pass"""

    workspace: ReplayMemoryWorkspace
    """Tensors that live within a slot"""

    inputs: ReplayMemoryInputs
    """Tokens, labels and positions"""

    outside: ReplayMemoryOutside
    """Context and communicators"""


@dataclass(kw_only=True, repr=False)
class ReplaySkew(Document):
    """Figures over the distribution of the plan's routing; all equal where routing is balanced"""

    load: Quantiles
    """Load over the mean that makes the step as long, the same in every layer"""

    step_seconds: Quantiles
    """Step time, s"""

    tflops_per_gpu: Quantiles
    """Model TFLOP/s per GPU"""

    memory_gib: Quantiles
    """Peak memory, GiB"""

    overflow_probability: float
    """Probability that a step exceeds the planned capacity and runs again [fraction]"""

    replication: Replication | None
    """What copies of hot experts would give; null where routing is balanced"""


@dataclass(kw_only=True, repr=False)
class ReplayInterval(Document):
    """Where the measured tflops_per_gpu is expected"""

    low: float
    """Lower end [TFLOP/s]"""

    high: float
    """Upper end [TFLOP/s]"""

    coverage: float
    """Share of runs that such intervals are made to hold [fraction]"""

    rows: int
    """Measured runs that it rests on [runs]"""

    new_family: bool
    """No measured run has a model of this family"""

    new_system: bool
    """No measured run is of this machine"""

    new_stack: bool
    """No measured run is of this stack"""

    new_release: bool
    """No measured run is of this stack on this machine"""


@dataclass(kw_only=True, repr=False)
class Replay(Document):
    """The event-driven simulation of one step of a plan."""

    schema: Literal["moe-plan/replay/1"]
    """Name and version of this schema"""

    tflops_per_gpu: float
    """Model FLOPs of a second on one GPU; recomputation not counted [TFLOP/s]"""

    tokens_per_second_per_gpu: float
    """Tokens of the global batch per second and GPU [tokens/s]"""

    step_seconds: float
    """One optimizer step [s]"""

    memory_gib: float
    """Peak of the rank that needs most, with context and communicators [GiB]"""

    fits: bool
    """Whether that is within the hardware's memory"""

    breakdown: Breakdown
    """Exclusive seconds of the step on the rank that waits least; they add up to it"""

    memory: ReplayMemory
    """Memory of the fullest pipeline rank; the classes add up to memory_gib"""

    skew: ReplaySkew
    """Figures over the distribution of the plan's routing; all equal where routing is balanced"""

    documents: DocumentSteps | None
    """Steps over samples of documents with drawn lengths; null where the plan masks no documents of known lengths"""

    neighbours: Neighbours | None
    """How residuals of runs nearby correct the prediction; null where they do not"""

    interval: ReplayInterval | None
    """Where the measured tflops_per_gpu is expected"""

    interval_reason: str | None = None
    """Why there is no interval; only where interval is null"""

    ops: int
    """Ops played [ops]"""

    ranks: int
    """Ranks that the played ones stand for [ranks]"""

    trace: str | None = None
    """Path of the trace, where --trace asked for one"""

    report: str | None = None
    """Path of the page, where --report asked for one"""


@dataclass(kw_only=True, repr=False)
class ExplainWallsMemoryClass(Document):
    """One part"""

    class_: str = dataclasses.field(metadata={"json": "class"})
    """Class, or module of saved activations"""

    gib: float
    """Its bytes [GiB]"""


@dataclass(kw_only=True, repr=False)
class ExplainWallsMemory(Document):
    """Memory of the fullest pipeline rank"""

    stage: int
    """That pipeline rank [rank]"""

    memory_gib: float
    """What it needs [GiB]"""

    limit_gib: float
    """What it may hold [GiB]"""

    classes: list[ExplainWallsMemoryClass]
    """Parts, largest first; they add up to memory_gib"""


@dataclass(kw_only=True, repr=False)
class ExplainWallsCommunicationAxis(Document):
    """One axis"""

    axis: str
    """Tensor, context, expert, pipeline or data"""

    busy_seconds: float
    """Transfers, waiting for peers left out [s]"""

    exposed_seconds: float
    """Of the step with nothing computing beside them [s]"""

    bytes: float
    """Sum over the ops [bytes]"""

    ops: int
    """Transfers [ops]"""


@dataclass(kw_only=True, repr=False)
class ExplainWallsCommunication(Document):
    """Communication of the slowest pipeline rank"""

    stage: int
    """That pipeline rank [rank]"""

    axes: list[ExplainWallsCommunicationAxis]
    """Parallel axes, busiest first"""

    sparing_products: int
    """Products that leave multiprocessors to dispatch and combine beside them [ops]"""

    spared_multiprocessors: int
    """And how many at most [SMs]"""


@dataclass(kw_only=True, repr=False)
class ExplainWallsComputeClass(Document):
    """One class"""

    class_: str = dataclasses.field(metadata={"json": "class"})
    """Products, grouped products, attention, scans, rows, copies or other"""

    busy_seconds: float
    """Computing [s]"""

    seconds_at_peak: float
    """FLOPs or bytes at the machine's peak, whichever takes longer [s]"""

    recompute_seconds: float
    """Of busy_seconds, recomputation [s]"""

    ops: int
    """Ops [ops]"""


@dataclass(kw_only=True, repr=False)
class ExplainWallsCompute(Document):
    """Computing of the slowest pipeline rank"""

    stage: int
    """That pipeline rank [rank]"""

    seconds_at_peak: float
    """Model FLOPs at the precision's peak [s]"""

    mfu: float
    """Seconds_at_peak over the step [fraction]"""

    host_issue_seconds: float
    """Host time to issue the ops [s]"""

    host_exposed_seconds: float
    """Of the step waiting for the host [s]"""

    launches: int
    """Ops that the host issues [ops]"""

    unaligned_products: int
    """Products with rows that are not whole 16 bytes [ops]"""

    unaligned_seconds: float
    """What they lose by it [s]"""

    classes: list[ExplainWallsComputeClass]
    """Classes of ops, busiest first"""


@dataclass(kw_only=True, repr=False)
class ExplainWallsLoss(Document):
    """One cause"""

    cause: str
    """What takes the time"""

    seconds: float
    """Seconds of the step [s]"""


@dataclass(kw_only=True, repr=False)
class ExplainWalls(Document):
    """What bounds the step"""

    memory: ExplainWallsMemory
    """Memory of the fullest pipeline rank"""

    communication: ExplainWallsCommunication
    """Communication of the slowest pipeline rank"""

    compute: ExplainWallsCompute
    """Computing of the slowest pipeline rank"""

    losses: list[ExplainWallsLoss]
    """Where the step loses most, largest first"""


@dataclass(kw_only=True, repr=False)
class ExplainBase(Document):
    """Figures of the fast estimate, to which deltas and front compare"""

    tflops_per_gpu: float
    """Model FLOPs of a second on one GPU; recomputation not counted [TFLOP/s]"""

    step_seconds: float
    """One optimizer step [s]"""

    memory_gib: float
    """Peak of the rank that needs most, with context and communicators [GiB]"""

    fits: bool
    """Whether that is within the hardware's memory"""


@dataclass(kw_only=True, repr=False)
class Change(Document):
    """One field of a plan and two values of it"""

    field: str
    """Name of the field as --fix has it, or model, hardware, stack, gpus, gbs, seq, edp"""

    from_: str = dataclasses.field(metadata={"json": "from"})
    """Value before"""

    to: str
    """Value after"""


@dataclass(kw_only=True, repr=False)
class ExplainDelta(Document):
    """One change"""

    field: str
    """Field of the plan that is changed"""

    from_: str = dataclasses.field(metadata={"json": "from"})
    """Value in the plan"""

    to: str
    """Value tried"""

    along: list[Change]
    """Fields that had to change with it"""

    tflops_per_gpu: float
    """Model FLOPs of a second on one GPU; recomputation not counted [TFLOP/s]"""

    step_seconds: float
    """One optimizer step [s]"""

    memory_gib: float
    """Peak of the rank that needs most, with context and communicators [GiB]"""

    fits: bool
    """Whether that is within the hardware's memory"""

    gain: float
    """TFLOP/s over those of base, - 1 [fraction]"""

    certainty: float | None
    """Probability that the sign of gain is right, by pairs of published runs; null where nothing is known [fraction]"""

    step_seconds_delta: float
    """Step time less that of base [s]"""

    memory_gib_delta: float
    """Memory less that of base [GiB]"""


@dataclass(kw_only=True, repr=False)
class ExplainImpossible(Document):
    """One change"""

    field: str
    """Field of the plan that is changed"""

    from_: str = dataclasses.field(metadata={"json": "from"})
    """Value in the plan"""

    to: str
    """Value tried"""

    reason: str
    """Why"""


@dataclass(kw_only=True, repr=False)
class ExplainFront(Document):
    """One plan"""

    changes: list[Change]
    """Fields in which it differs from PLAN"""

    tflops_per_gpu: float
    """Model FLOPs of a second on one GPU; recomputation not counted [TFLOP/s]"""

    step_seconds: float
    """One optimizer step [s]"""

    memory_gib: float
    """Peak of the rank that needs most, with context and communicators [GiB]"""

    fits: bool
    """Whether that is within the hardware's memory"""


@dataclass(kw_only=True, repr=False)
class ExplainVersusThere(Document):
    """Figures of the other plan"""

    tflops_per_gpu: float
    """Model FLOPs of a second on one GPU; recomputation not counted [TFLOP/s]"""

    step_seconds: float
    """One optimizer step [s]"""

    memory_gib: float
    """Peak of the rank that needs most, with context and communicators [GiB]"""

    fits: bool
    """Whether that is within the hardware's memory"""


@dataclass(kw_only=True, repr=False)
class ExplainVersusBreakdown(Document):
    """One part"""

    part: str
    """Its name"""

    here_seconds: float
    """Of PLAN [s]"""

    there_seconds: float
    """Of the other plan [s]"""


@dataclass(kw_only=True, repr=False)
class ExplainVersusByKind(Document):
    """One part"""

    kind: str
    """Its name"""

    here_seconds: float
    """Of PLAN [s]"""

    there_seconds: float
    """Of the other plan [s]"""


@dataclass(kw_only=True, repr=False)
class ExplainVersusMemory(Document):
    """One part"""

    class_: str = dataclasses.field(metadata={"json": "class"})
    """Its name"""

    here_gib: float
    """Of PLAN [GiB]"""

    there_gib: float
    """Of the other plan [GiB]"""


@dataclass(kw_only=True, repr=False)
class ExplainVersus(Document):
    """The other plan beside this one; only with --versus"""

    fields: list[Change]
    """Fields in which they differ"""

    there: ExplainVersusThere
    """Figures of the other plan"""

    breakdown: list[ExplainVersusBreakdown]
    """Parts of the step of the slowest rank"""

    by_kind: list[ExplainVersusByKind]
    """Busy time by kind of op"""

    memory: list[ExplainVersusMemory]
    """Memory of the fullest rank by class"""


@dataclass(kw_only=True, repr=False)
class ExplainConstraint(Document):
    """One constraint"""

    constraint: str
    """Its name"""

    candidates: int
    """Candidates that fail it [plans]"""

    example: str
    """One of them, with its numbers"""


@dataclass(kw_only=True, repr=False)
class ExplainClosest(Document):
    """One mapping"""

    memory_gib: float
    """What it needs [GiB]"""

    limit_gib: float
    """What a GPU has [GiB]"""

    plan: Plan
    """The plan"""


@dataclass(kw_only=True, repr=False)
class ExplainRemedy(Document):
    """One change"""

    change: str
    """Option that changes"""

    from_: str = dataclasses.field(metadata={"json": "from"})
    """Value asked for"""

    to: str
    """Value that gives a plan"""

    memory_gib: float
    """What that plan needs [GiB]"""

    plan: Plan
    """That plan"""


@dataclass(kw_only=True, repr=False)
class Explain(Document):
    """Why a plan is as fast as it is, or why a request has no plan."""

    schema: Literal["moe-plan/explain/1"]
    """Name and version of this schema"""

    feasible: bool
    """A plan is explained; false: the request has none"""

    tflops_per_gpu: float | None = None
    """Model FLOPs of a second on one GPU; recomputation not counted [TFLOP/s]"""

    step_seconds: float | None = None
    """One optimizer step [s]"""

    memory_gib: float | None = None
    """Peak of the rank that needs most, with context and communicators [GiB]"""

    fits: bool | None = None
    """Whether that is within the hardware's memory"""

    plan: Plan | None = None
    """The plan that is explained"""

    neighbours: Neighbours | None = None
    """How residuals of runs nearby correct the prediction; null where they do not"""

    walls: ExplainWalls | None = None
    """What bounds the step"""

    base: ExplainBase | None = None
    """Figures of the fast estimate, to which deltas and front compare"""

    deltas: list[ExplainDelta] | None = None
    """Single changes, the fastest first"""

    impossible: list[ExplainImpossible] | None = None
    """Changes that give no sound plan"""

    front: list[ExplainFront] | None = None
    """Plans of the same mapping that none beats in both memory and time"""

    versus: ExplainVersus | None = None
    """The other plan beside this one; only with --versus"""

    reason: str | None = None
    """Why there is no plan; this and what follows only where feasible is false"""

    constraints: list[ExplainConstraint] | None = None
    """What excluded candidates, most first"""

    closest: list[ExplainClosest] | None = None
    """Mappings that need least memory"""

    remedies: list[ExplainRemedy] | None = None
    """Single changes of the request that give a plan"""


@dataclass(kw_only=True, repr=False)
class Launch(Document):
    """The job file that executes a plan."""

    schema: Literal["moe-plan/launch/1"]
    """Name and version of this schema"""

    nodes: int
    """Nodes of the job [nodes]"""

    processes_per_node: int
    """Ranks on each node [processes]"""

    out: str
    """Path written, empty for none"""

    text: str
    """Content of the job file"""


@dataclass(kw_only=True, repr=False)
class LaunchEngine(Document):
    """A plan in the words of another engine: `--megatron-lm`, `--megatron-bridge`, `--torchtitan`, `--automodel` or
    `--megatron-core`."""

    schema: Literal["moe-plan/launch-engine/1"]
    """Name and version of this schema"""

    engine: Literal["megatron-lm", "megatron-bridge", "torchtitan", "automodel", "megatron-core"]
    """`megatron-lm`, `megatron-bridge`, `torchtitan`, `automodel` or `megatron-core`"""

    release: str
    """Release whose words these are; of Megatron-Core for `megatron-lm`"""

    recipe: str | None = None
    """Megatron-Bridge: name of the recipe that is overridden"""

    args: list[str] | None = None
    """Megatron-LM: arguments of its program; Megatron-Bridge: words for its run script"""

    config: dict[str, Any] | None = None
    """Content of the YAML or TOML file"""

    class_: Literal["TransformerConfig", "MLATransformerConfig"] | None = dataclasses.field(default=None, metadata={"json": "class"})
    """Megatron-Core: class of the configuration"""

    kwargs: dict[str, Any] | None = None
    """Its keyword arguments; names of Python such as `torch.bfloat16` as text"""

    optimizer: dict[str, Any] | None = None
    """Keyword arguments of `OptimizerConfig`"""

    ddp: dict[str, Any] | None = None
    """Keyword arguments of `DistributedDataParallelConfig`"""

    env: dict[str, str]
    """Variables of the environment by name"""

    nodes: int
    """Nodes of the job [nodes]"""

    gpus_per_node: int
    """Ranks on each node [GPUs]"""

    out: str
    """Path written, empty for none"""

    text: str | None = None
    """Content of the file; missing where it is this document"""


@dataclass(kw_only=True, repr=False)
class ImportUnknown(Document):
    """One setting or part of a script"""

    setting: str
    """Its name; empty for a part of a script"""

    value: str
    """Its value as written, or the part"""

    file: str
    """Where it stands"""

    line: int
    """Line of it, of a command the first one; 0 where it is not known [lines]"""

    why: str
    """Why it was not understood"""


@dataclass(kw_only=True, repr=False)
class ImportFinding(Document):
    """One finding"""

    severity: Literal["error", "warning", "hint"]
    """`error`: the engine would refuse it or it does not fit; `warning`: file and plan differ, or it may not fit;
    `hint`: what would be faster, or is assumed"""

    field: str
    """Field of a plan, fact of a model, `memory`, or name of a setting"""

    message: str
    """One line"""


@dataclass(kw_only=True, repr=False)
class Import(Document):
    """A launch file of another engine read as a plan, with what was not understood and what speaks against the plan."""

    schema: Literal["moe-plan/import/1"]
    """Name and version of this schema"""

    engine: Literal["megatron-lm", "megatron-bridge", "torchtitan", "automodel"]
    """Whose file it is"""

    release: str
    """Release whose words were taken; of Megatron-Core for `megatron-lm` and `megatron-bridge`"""

    plan: Plan
    """The plan that was read"""

    settings: int
    """Settings in the files [settings]"""

    harmless: int
    """Those among them that change neither time nor memory, such as logging and paths [settings]"""

    unknown: list[ImportUnknown]
    """What was not understood"""

    findings: list[ImportFinding]
    """What speaks against the plan: errors, then warnings, then hints"""

    out: str
    """Path written, empty for none"""


@dataclass(kw_only=True, repr=False)
class SecondsByKind(Document):
    """One kind of op, predicted beside measured"""

    kind: str
    """Kind of op, such as gemm or grouped_gemm"""

    count: int
    """Ops in the step, over all ranks [ops]"""

    predicted_seconds: float
    """Busy time per step and rank as predicted [s]"""

    measured_seconds: float
    """Busy time per step and rank as measured [s]"""


@dataclass(kw_only=True, repr=False)
class CompareWidest(Document):
    """One op"""

    kind: str
    """Kind of op"""

    rank: int
    """Global rank [rank]"""

    slot: int
    """Slot of the rank's program"""

    op: int
    """Op within the slot"""

    layer: int
    """Layer, -1 outside of layers"""

    phase: str
    """Forward, dgrad, wgrad, recompute or step"""

    predicted_seconds: float
    """Busy time as predicted [s]"""

    measured_seconds: float
    """Busy time as measured [s]"""


@dataclass(kw_only=True, repr=False)
class Compare(Document):
    """A predicted and a measured timeline of one plan, lined up op by op."""

    schema: Literal["moe-plan/compare/1"]
    """Name and version of this schema"""

    predicted_tflops_per_gpu: float
    """As predicted [TFLOP/s]"""

    measured_tflops_per_gpu: float
    """As measured [TFLOP/s]"""

    error: float
    """Predicted / measured - 1 of the TFLOP/s [fraction]"""

    predicted_step_seconds: float
    """As predicted [s]"""

    measured_step_seconds: float
    """Median of the recorded steps [s]"""

    predicted_memory_gib: float
    """Peak over ranks as predicted [GiB]"""

    measured_memory_gib: float
    """Peak over ranks as it ran [GiB]"""

    predicted_exposed_communication_seconds: float
    """Communication with nothing computing beside it, predicted [s]"""

    measured_exposed_communication_seconds: float
    """The same as measured [s]"""

    matched_ops: int
    """Ops that both timelines hold [ops]"""

    by_kind: list[SecondsByKind]
    """Kinds of op, most measured time first"""

    widest: list[CompareWidest]
    """Ops that are furthest apart, furthest first"""


@dataclass(kw_only=True, repr=False)
class CompareLogOutlier(Document):
    """One outlier"""

    iteration: int
    """Its number"""

    seconds: float
    """Of its step [s]"""


@dataclass(kw_only=True, repr=False)
class CompareLogSpread(Document):
    """How far the iterations used lie apart"""

    low_seconds: float
    """10% quantile [s]"""

    high_seconds: float
    """90% quantile [s]"""

    relative: float
    """Their difference over the median [fraction]"""


@dataclass(kw_only=True, repr=False)
class CompareLog(Document):
    """A training log of another engine beside the prediction of a plan."""

    schema: Literal["moe-plan/compare-log/1"]
    """Name and version of this schema"""

    engine: str
    """Whose log it is"""

    format: str
    """The format that recognised it: a file of profiles/logs"""

    predicted_tflops_per_gpu: float
    """As predicted [TFLOP/s]"""

    measured_tflops_per_gpu: float
    """By the measured step and the plan's own FLOPs [TFLOP/s]"""

    logged_tflops_per_gpu: float | None
    """As the engine counts its FLOPs, median; null where the log does not say [TFLOP/s]"""

    error: float
    """Predicted / measured - 1 of the TFLOP/s [fraction]"""

    predicted_step_seconds: float
    """As predicted [s]"""

    measured_step_seconds: float
    """Median of the iterations used [s]"""

    step_seconds_from: Literal["time", "tokens per second", "samples per second", "elapsed time"]
    """What the log tells"""

    predicted_memory_gib: float
    """Peak over ranks as predicted [GiB]"""

    measured_memory_gib: float | None
    """Allocated, else reserved; null where the log tells neither [GiB]"""

    measured_allocated_gib: float | None
    """Peak that PyTorch allocated, over ranks that print it [GiB]"""

    measured_reserved_gib: float | None
    """Peak that PyTorch reserved [GiB]"""

    iterations: int
    """Logged iterations that the median is of [iterations]"""

    logged_iterations: int
    """Logged iterations of the run [iterations]"""

    warm_up: int
    """Of them left out at the front [iterations]"""

    other_batch: int
    """Of them left out since their batch or sequence is another [iterations]"""

    skipped: int
    """Of them left out since the optimizer left out steps [iterations]"""

    outlier_count: int
    """Of them left out behind the warm-up [iterations]"""

    outliers: list[CompareLogOutlier]
    """The first 100 of these"""

    spread: CompareLogSpread
    """How far the iterations used lie apart"""

    first_loss: float | None
    """First that is logged [nats]"""

    last_loss: float | None
    """Last that is logged [nats]"""

    runs: int
    """In the log; the last whole one is compared [runs]"""

    cut: bool
    """The last line has no end and was left out"""

    warnings: list[str]
    """Where the job is another than the plan's, or the log says too little"""


@dataclass(kw_only=True, repr=False)
class CompareProfileStep(Document):
    """One step"""

    step: int
    """Its number"""

    seconds: float
    """Its time [s]"""


@dataclass(kw_only=True, repr=False)
class CompareProfileByKind(Document):
    """Op kinds that the kernels' names do not tell apart, often one"""

    kind: str
    """The op kind, or what several are together"""

    kinds: list[str]
    """The op kinds"""

    communication: bool
    """Whether they communicate"""

    count: int
    """Ops as predicted [ops]"""

    kernels: float
    """Kernels, copies and fills as measured [kernels]"""

    predicted_seconds: float
    """Busy time as predicted [s]"""

    predicted_wait_seconds: float
    """Waiting for peers as predicted, beside the busy time [s]"""

    measured_seconds: float
    """Time of the kernels; of communication with waiting for peers [s]"""


@dataclass(kw_only=True, repr=False)
class CompareProfileStream(Document):
    """One stream"""

    device: str
    """The device, as the profile counts"""

    stream: int
    """Its number"""

    kernels: float
    """That ran on it [kernels]"""

    seconds: float
    """Of its kernels [s]"""

    communication_seconds: float
    """Of those that communicate [s]"""


@dataclass(kw_only=True, repr=False)
class CompareProfileUnmatched(Document):
    """One name"""

    name: str
    """Of the kernel, cut after 300 characters"""

    kernels: float
    """That have it [kernels]"""

    seconds: float
    """Of them [s]"""

    share: float
    """Of kernel_seconds [fraction]"""


@dataclass(kw_only=True, repr=False)
class CompareProfile(Document):
    """A profile of another engine beside the predicted timeline of a plan. Figures are of one step of one rank."""

    schema: Literal["moe-plan/compare-profile/1"]
    """Name and version of this schema"""

    source: Literal["PyTorch profiler", "Nsight Systems"]
    """Which profiler"""

    gpu: str
    """The device's name, empty where the profile does not say"""

    kernel_table: str
    """Names of kernels: a file of profiles/kernels"""

    rank: int
    """Whose profile it is [rank]"""

    rank_known: bool
    """The profile or --rank says so; else rank 0 is taken"""

    pipeline_rank: int
    """Of that rank [rank]"""

    represents: int
    """Ranks of the job that run the same [ranks]"""

    devices: int
    """In the profile; figures are means over them [GPUs]"""

    steps_said: bool
    """--steps says how many there are"""

    kernels_outside: int
    """Kernels launched in no step, left out [kernels]"""

    predicted_tflops_per_gpu: float
    """As predicted [TFLOP/s]"""

    measured_tflops_per_gpu: float
    """By the measured step and the plan's own FLOPs [TFLOP/s]"""

    error: float
    """Predicted / measured - 1 of the TFLOP/s [fraction]"""

    predicted_step_seconds: float
    """As predicted [s]"""

    measured_step_seconds: float
    """Mean over steps, from first kernel to first kernel [s]"""

    predicted_exposed_communication_seconds: float
    """Communication beside which no kernel computes, predicted [s]"""

    measured_exposed_communication_seconds: float
    """The same as measured [s]"""

    predicted_idle_seconds: float
    """Nothing runs on the device, predicted [s]"""

    measured_idle_seconds: float
    """The same as measured [s]"""

    kernel_seconds: float
    """Of all kernels, copies and fills [s]"""

    unmatched_seconds: float
    """Of those whose names no rule knows [s]"""

    unmatched_share: float
    """Of kernel_seconds [fraction]"""

    steps: list[CompareProfileStep]
    """Steps found"""

    by_kind: list[CompareProfileByKind]
    """Op kinds, most measured time first"""

    streams: list[CompareProfileStream]
    """Streams of the devices, most time first"""

    unmatched_names: int
    """Names that no rule knows [names]"""

    unmatched: list[CompareProfileUnmatched]
    """The first 100 of them, most time first"""

    warnings: list[str]
    """Where the job is another than the plan's, or the profile says too little"""


@dataclass(kw_only=True, repr=False)
class ValidateRow(Document):
    """One row"""

    run_id: str
    """Name of the row"""

    published_tflops_per_gpu: float | None
    """Published figure, null where the row has none [TFLOP/s]"""

    predicted_tflops_per_gpu: float | None
    """Prediction, null where skipped [TFLOP/s]"""

    error: float | None
    """Predicted / published - 1, null where skipped [fraction]"""

    interval: list[float] | None
    """Where published_tflops_per_gpu is expected, [low, high]; null where nothing is known"""

    neighbours: Neighbours | None
    """How residuals of runs nearby correct the prediction; null where they do not"""

    skipped: str | None
    """Why the row is skipped, null where it is not"""

    warnings: list[str]
    """What was assumed or does not fit"""

    stack: str | None = None
    """Stack whose costs were taken; this and what follows only where predicted"""

    mbs: int | None = None
    """Micro-batch [sequences]"""

    recompute: str | None = None
    """Recomputed modules, joined by +, or none"""

    step_seconds: float | None = None
    """One optimizer step [s]"""

    memory_gib: float | None = None
    """Peak of the rank that needs most, with context and communicators [GiB]"""

    breakdown: Breakdown | None = None
    """Exclusive seconds of the step on the rank that waits least; they add up to it"""


@dataclass(kw_only=True, repr=False)
class ValidateSummary(Document):
    """How predictions and published figures agree"""

    rows: int
    """Rows of the group [rows]"""

    predicted: int
    """Of them, predicted [rows]"""

    skipped: int
    """Of them, skipped [rows]"""

    mape: float
    """Mean absolute error [fraction]"""

    bias: float
    """Mean of error [fraction]"""

    within_10_percent: float
    """Share of predicted rows whose error is at most 0.1 either way [fraction]"""

    kendall_tau: float
    """(concordant - discordant) / pairs"""

    pairs: int
    """Pairs of rows of one model whose published figures differ by more than 3 % [pairs]"""

    intervals: int
    """Rows that have an interval [rows]"""

    coverage: float
    """Share of them whose published figure lies inside [fraction]"""

    width: float
    """Mean of the intervals' high / low - 1 [fraction]"""


@dataclass(kw_only=True, repr=False)
class ValidateGroups(Document):
    """The same by property of the rows"""

    tier: dict[str, ValidateSummary]
    """By tier"""

    kind: dict[str, ValidateSummary]
    """Dense, MoE or hybrid"""

    system: dict[str, ValidateSummary]
    """By machine"""

    precision: dict[str, ValidateSummary]
    """By number format"""

    stack: dict[str, ValidateSummary]
    """By stack"""

    family: dict[str, ValidateSummary]
    """By architecture"""

    model: dict[str, ValidateSummary]
    """By model"""

    class_: dict[str, ValidateSummary] = dataclasses.field(metadata={"json": "class"})
    """By tier and kind"""


@dataclass(kw_only=True, repr=False)
class ValidateIntervals(Document):
    """How intervals and published figures agree"""

    coverage: float
    """Share of rows whose published figure lies inside [fraction]"""

    width: float
    """Mean of high / low - 1 [fraction]"""


@dataclass(kw_only=True, repr=False)
class ValidateLeftOut(Document):
    """One way: row, family, system, model, system and release"""

    all: ValidateIntervals
    """Of all rows of tiers A and B"""

    systems: dict[str, ValidateIntervals]
    """By hardware profile, of those with five rows or more"""


@dataclass(kw_only=True, repr=False)
class ValidateImprovement(Document):
    """One row"""

    run_id: str
    """Name of the row"""

    published_plan_tflops_per_gpu: float
    """Prediction of the published plan [TFLOP/s]"""

    tflops_per_gpu: float
    """Prediction of the best plan found [TFLOP/s]"""

    candidates: int
    """Plans that were priced [plans]"""

    seconds: float
    """Wall time of the search [s]"""

    changes: list[Change]
    """Fields in which the best plan differs"""

    plan: Plan
    """The best plan"""


@dataclass(kw_only=True, repr=False)
class Validate(Document):
    """Published runs, each predicted with the very plan of its row."""

    schema: Literal["moe-plan/validate/1"]
    """Name and version of this schema"""

    rows: list[ValidateRow]
    """Rows in the order of the file"""

    summary: ValidateSummary
    """Figures over all rows"""

    groups: ValidateGroups
    """The same by property of the rows"""

    left_out: dict[str, ValidateLeftOut] | None = None
    """Intervals of the runs that were fitted, by what was left out of fit and neighbours; absent where nothing
    corrects"""

    improvements: list[ValidateImprovement] | None = None
    """Better plans of the same request; only with --improve"""


@dataclass(kw_only=True, repr=False)
class ShowModelsModel(Document):
    """One model"""

    name: str
    """Name, as --model takes it"""

    architecture: str
    """Architecture that its config.json names"""

    parameters: int
    """Parameters, MTP layers included [parameters]"""

    active_parameters: int
    """Parameters that one token passes, without MTP [parameters]"""

    layers: int
    """Decoder layers [layers]"""

    executable: bool
    """Execute can train it"""


@dataclass(kw_only=True, repr=False)
class ShowModels(Document):
    """The models that have a profile."""

    schema: Literal["moe-plan/show-models/1"]
    """Name and version of this schema"""

    models: list[ShowModelsModel]
    """Models, by name"""


@dataclass(kw_only=True, repr=False)
class ShowModelRope(Document):
    """Rotary position embedding"""

    theta: float
    """Base of the frequencies"""

    interleaved: bool
    """Adjacent elements are a pair, not those half a head apart"""

    scaling: str | None
    """Kind of scaling, null without"""

    factor: float
    """Factor of the scaling"""

    original_positions: int
    """Positions before the scaling, 0 = not given [tokens]"""


@dataclass(kw_only=True, repr=False)
class ShowModelKindAttention(Document):
    """Attention; figures that are 0 and flags that are off are left out"""

    kind: Literal["softmax", "latent", "gated_delta", "compressed", "mamba", "opaque", "none"]
    """Kind of attention"""

    text: str
    """The same in words"""

    heads: int | None = None
    """Query heads [heads]"""

    kv_heads: int | None = None
    """Key and value heads [heads]"""

    qk_dim: int | None = None
    """Width of a head's queries and keys [elements]"""

    v_dim: int | None = None
    """Width of a head's values [elements]"""

    rope_dim: int | None = None
    """Rotated columns of a head [elements]"""

    q_lora: int | None = None
    """Latent width of queries [elements]"""

    kv_lora: int | None = None
    """Latent width of keys and values [elements]"""

    opaque_weights: int | None = None
    """Weights of a mixer that is priced alone, the layer's own or beside its attention"""

    window: int | None = None
    """Positions that a query sees, itself included [tokens]"""

    chunk: int | None = None
    """Positions in a run beyond which no query sees [tokens]"""

    key_heads: int | None = None
    """Linear attention and Mamba: heads of keys, or groups [heads]"""

    value_heads: int | None = None
    """Linear attention and Mamba: heads of values, or heads [heads]"""

    key_dim: int | None = None
    """Width of a head's keys, or its state [elements]"""

    value_dim: int | None = None
    """Width of a head's values, or of a head [elements]"""

    conv_kernel: int | None = None
    """Positions of the short convolution [tokens]"""

    compress_ratio: int | None = None
    """Positions behind one compressed key [tokens]"""

    indexer_heads: int | None = None
    """Heads of the indexer that picks keys [heads]"""

    indexer_top_k: int | None = None
    """Keys that it picks for a query [tokens]"""

    qkv_bias: bool | None = None
    """Queries, keys and values have a bias"""

    out_bias: bool | None = None
    """The output projection has a bias"""

    qk_norm: bool | None = None
    """Queries and keys are normed head by head"""

    sinks: bool | None = None
    """Every head has a sink logit"""

    output_gate: bool | None = None
    """A sigmoid gates the output"""

    head_gate: bool | None = None
    """A sigmoid gates every head"""


@dataclass(kw_only=True, repr=False)
class ShowModelKindMoe(Document):
    """Experts; null for a dense MLP"""

    experts: int
    """Routed experts [experts]"""

    top_k: int
    """Experts of a token [experts]"""

    ffn: int
    """Width of a routed expert [elements]"""

    shared_ffn: int
    """Width of the shared experts together, 0 = none [elements]"""

    latent: int | None = None
    """Width that tokens travel and experts work in, where it is not the model's [elements]"""

    groups: int
    """Groups of experts [groups]"""

    groups_kept: int
    """Groups that a token's experts may come from [groups]"""


@dataclass(kw_only=True, repr=False)
class ShowModelKind(Document):
    """One kind"""

    layers: list[int]
    """Decoder layers of the kind, from 0"""

    mtp_layers: int
    """MTP layers of the kind [layers]"""

    attention: ShowModelKindAttention
    """Attention; figures that are 0 and flags that are off are left out"""

    mlp: str
    """Experts or dense MLP in words"""

    dense_ffn: int
    """Width of a dense MLP, 0 = none [elements]"""

    moe: ShowModelKindMoe | None
    """Experts; null for a dense MLP"""


@dataclass(kw_only=True, repr=False)
class ShowModel(Document):
    """What a config.json or a model's profile was read as."""

    schema: Literal["moe-plan/show-model/1"]
    """Name and version of this schema"""

    name: str
    """Name of the model"""

    architecture: str
    """Architecture that the config.json names"""

    parameters: int
    """Parameters, MTP layers included [parameters]"""

    parameters_without_mtp: int
    """Parameters without MTP layers [parameters]"""

    active_parameters: int
    """Parameters that one token passes, without MTP [parameters]"""

    seq: int
    """Sequence length that the next field is for [tokens]"""

    gflop_per_token: float
    """FLOPs of training for one token [GFLOP/token]"""

    layers: int
    """Decoder layers [layers]"""

    mtp_layers: int
    """MTP layers [layers]"""

    hidden: int
    """Width [elements]"""

    vocab: int
    """Vocabulary [tokens]"""

    padded_vocab: int
    """Vocabulary as it is padded at TP 1 [tokens]"""

    tied_embeddings: bool
    """The LM head is the embedding table"""

    rope: ShowModelRope
    """Rotary position embedding"""

    executable: bool
    """Execute can train it"""

    why_not: list[str]
    """What execute cannot train of it"""

    left_out: list[str]
    """Fields of the config.json whose modules beside the language model are in no figure"""

    not_read: list[str]
    """Fields of the config.json that nothing was read from and that may change what the model computes"""

    kinds: list[ShowModelKind]
    """Kinds of layers"""


@dataclass(kw_only=True, repr=False)
class ShowHardwareListHardwarePeakFlops(Document):
    """Dense rate by precision; a missing one cannot be run"""

    fp32: float | None = None
    """Products in fp32 [FLOP/s]"""

    bf16: float | None = None
    """Products in bf16 [FLOP/s]"""

    fp8_tensor: float | None = dataclasses.field(default=None, metadata={"json": "fp8-tensor"})
    """Products in fp8-tensor [FLOP/s]"""

    fp8_blockwise: float | None = dataclasses.field(default=None, metadata={"json": "fp8-blockwise"})
    """Products in fp8-blockwise [FLOP/s]"""

    mxfp8: float | None = None
    """Products in mxfp8 [FLOP/s]"""

    nvfp4: float | None = None
    """Products in nvfp4 [FLOP/s]"""


@dataclass(kw_only=True, repr=False)
class ShowHardwareListHardware(Document):
    """One machine"""

    name: str
    """Name, as --hardware takes it"""

    peak_flops: ShowHardwareListHardwarePeakFlops
    """Dense rate by precision; a missing one cannot be run"""

    memory_gib: float
    """Memory of one GPU that a job can use; CPU: of the machine [GiB]"""

    nvlink_domain: int
    """GPUs that reach each other over NVLink [GPUs]"""

    gpus_per_node: int
    """GPUs of one host [GPUs]"""

    default_stack: str
    """Stack that is taken without --stack"""

    measured: bool
    """The profile holds measured calls"""


@dataclass(kw_only=True, repr=False)
class ShowHardwareList(Document):
    """The machines that have a profile."""

    schema: Literal["moe-plan/show-hardware-list/1"]
    """Name and version of this schema"""

    hardware: list[ShowHardwareListHardware]
    """Machines, by name"""


@dataclass(kw_only=True, repr=False)
class ShowHardwarePeakFlops(Document):
    """Dense rate by precision; a missing one cannot be run"""

    fp32: float | None = None
    """Products in fp32 [FLOP/s]"""

    bf16: float | None = None
    """Products in bf16 [FLOP/s]"""

    fp8_tensor: float | None = dataclasses.field(default=None, metadata={"json": "fp8-tensor"})
    """Products in fp8-tensor [FLOP/s]"""

    fp8_blockwise: float | None = dataclasses.field(default=None, metadata={"json": "fp8-blockwise"})
    """Products in fp8-blockwise [FLOP/s]"""

    mxfp8: float | None = None
    """Products in mxfp8 [FLOP/s]"""

    nvfp4: float | None = None
    """Products in nvfp4 [FLOP/s]"""


@dataclass(kw_only=True, repr=False)
class ShowHardwareLinksNvlink(Document):
    """Inside of a domain"""

    bytes_per_second: float
    """One way per GPU, 0 = there is none [bytes/s]"""

    latency_seconds: float
    """Per message [s]"""


@dataclass(kw_only=True, repr=False)
class ShowHardwareLinksPcie(Document):
    """Between the domains of a node"""

    bytes_per_second: float
    """One way per GPU, 0 = there is none [bytes/s]"""

    latency_seconds: float
    """Per message [s]"""


@dataclass(kw_only=True, repr=False)
class ShowHardwareLinksNic(Document):
    """Between nodes, and between domains that are nodes"""

    bytes_per_second: float
    """One way per GPU, 0 = there is none [bytes/s]"""

    latency_seconds: float
    """Per message [s]"""

    message_seconds: float | None = None
    """Of each message of an exchange, beside its bytes; left out where it is 0 [s]"""


@dataclass(kw_only=True, repr=False)
class ShowHardwareLinksHost(Document):
    """To the host's memory"""

    bytes_per_second: float
    """One way per GPU, 0 = there is none [bytes/s]"""

    latency_seconds: float
    """Per message [s]"""


@dataclass(kw_only=True, repr=False)
class ShowHardwareLinks(Document):
    """Links of one GPU"""

    nvlink: ShowHardwareLinksNvlink
    """Inside of a domain"""

    pcie: ShowHardwareLinksPcie
    """Between the domains of a node"""

    nic: ShowHardwareLinksNic
    """Between nodes, and between domains that are nodes"""

    host: ShowHardwareLinksHost
    """To the host's memory"""


@dataclass(kw_only=True, repr=False)
class ShowHardware(Document):
    """What a hardware profile was read as."""

    schema: Literal["moe-plan/show-hardware/1"]
    """Name and version of this schema"""

    name: str
    """Name of the machine"""

    cpu: bool
    """Ranks are threads that share the cores"""

    cores: int | None = None
    """CPU only: cores of the machine [cores]"""

    sm_count: int | None = None
    """GPU only: multiprocessors, 0 = not known [SMs]"""

    vendor: str
    """Who makes the GPU, empty for a CPU"""

    compute_capability: float
    """CUDA's, 0 for a CPU"""

    peak_flops: ShowHardwarePeakFlops
    """Dense rate by precision; a missing one cannot be run"""

    memory_gib: float
    """Memory of one GPU that a job can use; CPU: of the machine [GiB]"""

    memory_bytes_per_second: float
    """Rate of that memory [bytes/s]"""

    context_gib: float
    """Memory that the driver and its libraries take [GiB]"""

    host_memory_gib: float | None
    """Host memory for one GPU's offload, null where it is not known [GiB]"""

    nvlink_domain: int
    """GPUs that reach each other over NVLink [GPUs]"""

    nvlink_domain_used: int
    """GPUs of a domain that a job uses [GPUs]"""

    gpus_per_node: int
    """GPUs of one host [GPUs]"""

    links: ShowHardwareLinks
    """Links of one GPU"""

    default_stack: str
    """Stack that is taken without --stack"""

    measured: dict[str, int]
    """Measured calls, by family of ops"""

    measured_by: str
    """What measured them, empty where nothing did"""

    source: str
    """Where the figures come from"""


@dataclass(kw_only=True, repr=False)
class ShowStacksStack(Document):
    """One stack"""

    name: str
    """Name, as --stack takes it"""

    release: str
    """Release as its source names it"""

    executable: bool
    """Execute can run what it offers"""


@dataclass(kw_only=True, repr=False)
class ShowStacks(Document):
    """The stacks that have a profile."""

    schema: Literal["moe-plan/show-stacks/1"]
    """Name and version of this schema"""

    stacks: list[ShowStacksStack]
    """Stacks, by name"""


@dataclass(kw_only=True, repr=False)
class ShowStackEngine(Document):
    """The software whose rules its plans keep, by releases; null: none is known"""

    name: str | None
    """Engine"""

    release: str | None
    """Release of the engine"""

    transformer_engine: str | None
    """Release of Transformer Engine"""

    bridge: str | None
    """Release of Megatron-Bridge"""


@dataclass(kw_only=True, repr=False)
class ShowStackUsual(Document):
    """Choices that search takes unless they are fixed"""

    dispatcher: Literal["alltoall", "allgather", "deepep", "hybridep", "ncclep"]
    """Dispatcher"""

    cuda_graph: str
    """CUDA graphs"""

    ep_overlap: bool
    """EP overlap"""

    gradients: Literal["fp32", "bf16"]
    """Format in which gradients are summed"""


@dataclass(kw_only=True, repr=False)
class ShowStack(Document):
    """What a stack offers on a machine."""

    schema: Literal["moe-plan/show-stack/1"]
    """Name and version of this schema"""

    name: str
    """Name of the stack"""

    release: str
    """Release as its source names it"""

    hardware: str
    """Machine that it is shown for"""

    figures_of: str
    """Machine whose figures it has there"""

    executable: bool
    """Execute can run what it offers"""

    precisions: list[Literal["fp32", "bf16", "fp8-tensor", "fp8-blockwise", "mxfp8", "nvfp4"]]
    """Number formats"""

    dispatchers: list[Literal["alltoall", "allgather", "deepep", "hybridep", "ncclep"]]
    """Dispatchers"""

    cuda_graphs: list[str]
    """Choices of cuda_graph"""

    split_schedules: list[Literal["zero-bubble", "zb-v", "dualpipe-v"]]
    """Schedules with backwards in two slots"""

    tensor: bool
    """Offers TP"""

    context: bool
    """Offers CP"""

    expert_tensor: bool
    """Offers ETP"""

    interleaved: bool
    """Offers VPP"""

    ep_overlap: bool
    """Offers EP overlap"""

    offloads: bool
    """Offers offload"""

    bf16_moments: bool
    """Offers moments below FP32"""

    muon: bool
    """Offers Muon for the matrices of layers"""

    paged_stash: bool
    """Offers a paged stash"""

    recompute_modules: str
    """Modules that a plan may name, joined by +"""

    recompute_sets: list[str]
    """Sets that search tries, modules joined by +"""

    recipe_choices: dict[str, list[str]]
    """Values of plan fields that its recipes name, tried on the plans that search finds"""

    engine: ShowStackEngine
    """The software whose rules its plans keep, by releases; null: none is known"""

    usual: ShowStackUsual
    """Choices that search takes unless they are fixed"""

    features: list[str]
    """Capabilities that it has, of profiles/stacks/base/features.json"""

    source: str
    """Where it comes from"""


@dataclass(kw_only=True, repr=False)
class ShowPlan(Document):
    """What a plan.json was read as."""

    schema: Literal["moe-plan/show-plan/1"]
    """Name and version of this schema"""

    model: str
    """Name of the model"""

    hardware: str
    """Name of the machine"""

    stack: str
    """Name of the stack"""

    gpus: int
    """Ranks [GPUs]"""

    seq: int
    """Sequence length [tokens]"""

    gbs: int
    """Global batch [sequences]"""

    micro_batches: int
    """Micro-batches of a rank in a step [micro-batches]"""

    tokens_per_step: int
    """Tokens of the global batch [tokens]"""

    fields: dict[str, str]
    """Every field that --fix takes"""

    changed: list[str]
    """Fields that are not at their default"""

    fault: str | None
    """What the plan's own stack has against it, null = nothing"""

    executable: bool
    """Execute can run it"""

    why_not: list[str]
    """What execute cannot run of it"""


# What a document's field `schema` says it is.
BY_SCHEMA: dict[str, type[Document]] = {
    "moe-plan/search/1": Search,
    "moe-plan/replay/1": Replay,
    "moe-plan/explain/1": Explain,
    "moe-plan/launch/1": Launch,
    "moe-plan/launch-engine/1": LaunchEngine,
    "moe-plan/import/1": Import,
    "moe-plan/compare/1": Compare,
    "moe-plan/compare-log/1": CompareLog,
    "moe-plan/compare-profile/1": CompareProfile,
    "moe-plan/validate/1": Validate,
    "moe-plan/show-models/1": ShowModels,
    "moe-plan/show-model/1": ShowModel,
    "moe-plan/show-hardware-list/1": ShowHardwareList,
    "moe-plan/show-hardware/1": ShowHardware,
    "moe-plan/show-stacks/1": ShowStacks,
    "moe-plan/show-stack/1": ShowStack,
    "moe-plan/show-plan/1": ShowPlan,
}
