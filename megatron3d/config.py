"""Every setting of a run, as frozen dataclasses; read from TOML, overlaid by flags, resolved and checked once.

The one idea: a `Config` that has passed `validate.resolve` has no open question left in it (sizes that follow from
others are filled in) and describes a run that can start. Everything here is plain data and needs neither torch nor
processes. TOML and JSON are read and written in config_io.py, the command line in cli.py, the environment in launch.py.

Each field is at once a key of a TOML file (`[parallel] tp = 2`) and a flag (`--tp 2`); its docstring is the help text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Activation = Literal["gelu", "gelu_tanh", "swiglu"]
Normalization = Literal["layernorm", "rmsnorm"]
Positions = Literal["learned", "rope"]
Bias = Literal["none", "qkv", "all"]
DType = Literal["fp32", "bf16", "fp16", "fp64"]
Schedule = Literal["gpipe", "1f1b"]
LrSchedule = Literal["constant", "linear", "cosine", "wsd"]
Optimizer = Literal["adamw", "sgd"]
Recompute = Literal["none", "selective", "full"]
Device = Literal["auto", "cpu", "cuda"]
WandbMode = Literal["auto", "online", "offline"]


class ConfigError(ValueError):
    """A mistake of the user's: the message says what is wrong, the numbers, and a legal choice."""

    shared: bool = False
    """Whether every process of this machine is sure to find it too (set by launch.shared_mistakes)."""


class JobError(RuntimeError):
    """What ends a running job and is known to all its ranks: one of them tells it, in one paragraph."""


class FolderTaken(JobError):
    """Another run saves into the same folder."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama-3 frequency scaling: long wavelengths are slowed by `factor`, short ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The decoder's shape: what decides the parameters and the function they compute."""

    num_layers: int = 4
    """Transformer blocks in the whole model."""
    hidden_size: int = 64
    """Width of the residual stream."""
    ffn_hidden_size: int = 0
    """Inner width of the MLP; 0: 4 x hidden, or for SwiGLU 8/3 x hidden rounded up to a multiple of 64."""
    num_attention_heads: int = 4
    """Query heads."""
    num_query_groups: int = 0
    """Key/value heads (GQA; 1 is MQA); 0: as many as query heads."""
    head_dim: int = 0
    """Width of one head; 0: hidden_size / num_attention_heads."""
    vocab_size: int = 131
    """True vocabulary; the padding that a layout needs is never part of the model."""
    seq_length: int = 32
    """Tokens per sample."""
    max_position: int = 0
    """Longest context of the model, and the rows of a learned position table; 0: seq_length."""
    sliding_window: int = 0
    """Attention window the model was designed with; 0: none. A longer seq_length is refused: windows are not built."""
    activation: Activation = "swiglu"
    """gelu is the exact (erf) form, gelu_tanh the approximation that GPT-2 was trained with."""
    normalization: Normalization = "rmsnorm"
    """Norm before attention, before the MLP and before the head."""
    norm_epsilon: float = 1e-5
    """Added to the variance inside each norm."""
    position_embedding: Positions = "rope"
    """Learned absolute positions or rotary ones."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Llama-3 scaling of the rotary frequencies (TOML only)."""
    bias: Bias = "none"
    """Biases of the linear layers: none, on query/key/value only (Qwen2.5), or on all (GPT-2)."""
    qk_norm: bool = False
    """RMS-normalise each query and key head (Qwen3)."""
    tied_embeddings: bool = False
    """The output head uses the embedding matrix."""
    dropout: float = 0.0
    """Dropout on the embedding and on both residual branches."""
    init_std: float = 0.02
    """Standard deviation of initial matrices; those that end in the residual stream get init_std / sqrt(2 layers)."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the job is laid out over processes. No value here changes the maths."""

    tp: int = 1
    """Tensor-parallel size: processes that share each matrix."""
    pp: int = 1
    """Pipeline-parallel size: stages of consecutive layers."""
    dp: int = 0
    """Data-parallel size; 0: world size / (tp x pp)."""
    sp: bool | None = None
    """Sequence parallelism: split norms and residuals over tp along the sequence; default: on when tp > 1."""
    stage_layers: tuple[int, ...] = ()
    """Layers per stage, e.g. 3,1; default: by weight, so that the slowest stage is as fast as possible; the output
    head counts as the layers that it weighs, and may have the last stage for itself."""
    schedule: Schedule = "1f1b"
    """Order of forward and backward passes in the pipeline."""
    zero: Literal[0, 1] = 1
    """1: each data-parallel rank keeps masters and moments of its share only (ZeRO stage 1); 0: all of them."""
    overlap: bool = True
    """Reduce gradients behind the backward pass and gather parameters behind the next forward pass."""
    bucket_size: int = 25_000_000
    """Most gradient elements in one reduction; a bucket never spans layers."""
    recompute: Recompute = "none"
    """Activations recomputed in the backward pass: none, norms and activation functions, or whole blocks."""
    timeout_seconds: int = 600
    """A collective that waits longer than this ends the run."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How many samples a step takes, and in which portions."""

    micro_batch_size: int = 1
    """Samples per forward pass of one data-parallel rank."""
    global_batch_size: int = 0
    """Samples per optimizer step over all ranks; 0: micro_batch_size x dp."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer and its schedule."""

    optimizer: Optimizer = "adamw"
    """AdamW, or plain SGD (for comparisons)."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    lr_schedule: LrSchedule = "cosine"
    """Shape after the warm-up; wsd holds the peak, then falls linearly over the last decay_steps."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0."""
    decay_steps: int = 0
    """wsd only: steps of the final fall; 0: a tenth of train_steps, at least 1."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; norms and biases have none."""
    beta1: float = 0.9
    """AdamW: decay of the first moment."""
    beta2: float = 0.95
    """AdamW: decay of the second moment."""
    eps: float = 1e-8
    """AdamW: added to the root of the second moment."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0: no clipping."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from."""

    data_path: str = ""
    """Prefix of a .bin/.idx pair written by tools/preprocess_data.py."""
    split: str = "969,30,1"
    """Shares of the documents for training, validation and test."""
    tokenizer: str = ""
    """A SentencePiece model file, a tokenizer.json of Hugging Face's, or `byte`."""
    mock_data: bool = False
    """Train on generated sequences; needs no files."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where state is kept."""

    save: str = ""
    """Folder that receives checkpoints; empty: none are written."""
    load: str = ""
    """Folder to resume from: its newest checkpoint, saved by any layout."""
    save_interval: int = 0
    """Steps between checkpoints; 0: at the end only."""
    auto_resume: bool = False
    """Go on from the newest checkpoint in --save if there is one, else begin: for jobs that are restarted."""
    load_weights_only: bool = False
    """Begin a new run with the weights of --load: step 0, no moments, the data from its beginning."""
    override_schedule: bool = False
    """Go on from --load with another learning rate, schedule, batch size or number of steps than the saved run had."""
    keep_last: int = 0
    """Checkpoints that stay in --save; older ones go once a new one is whole. 0: all."""
    async_save: bool = False
    """Write checkpoints behind the following steps, from a copy that takes as much CPU memory as this rank's share."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What a run leaves to read."""

    log_dir: str = ""
    """Folder for metrics.jsonl and config.json; empty: console only."""
    progress: bool = True
    """Show a progress bar when the console is a terminal."""
    peak_tflops: float = 0.0
    """Dense peak of one device in TFLOP/s, for MFU; 0: looked up by the device's name, unknown on CPUs."""
    log_interval: int = 1
    """Steps between lines on the console, and between points sent to W&B and TensorBoard; metrics.jsonl has every step,
    and a step that evaluates is always shown."""
    log_level: int = 0
    """1: with each line the time of every phase (forward, backward, ...), least and most over the ranks. On GPUs each
    end of a phase then waits for the GPU, which costs some speed."""
    wandb_project: str = ""
    """Record the run on Weights & Biases, in this project; needs the package wandb."""
    wandb_name: str = ""
    """The run's name there; empty: W&B makes one up."""
    wandb_mode: WandbMode = "auto"
    """online; offline: into a local folder, for `wandb sync`; auto: as WANDB_MODE says, else online."""
    tensorboard_dir: str = ""
    """Folder for TensorBoard's event files; needs the package tensorboard."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How long, how exact, on what."""

    train_steps: int = 100
    """Optimizer steps in all; a resumed run goes on to this step."""
    eval_interval: int = 0
    """Steps between evaluations; 0: none."""
    eval_steps: int = 10
    """Global batches per evaluation; 0: the whole validation set."""
    dtype: DType = "fp32"
    """Type of weights and activations; gradients and optimizer state are at least fp32."""
    device: Device = "auto"
    """auto: one GPU per process where there are any, else the CPU."""
    check_replicas_every: int = 0
    """Steps between checks that copies of a weight on several ranks are still equal to the last bit; 0: none."""
    deterministic: bool = False
    """Bit-equal results on GPUs too: rank-ordered sums and deterministic kernels. The CPU always is."""
    exit_step: int = 0
    """Save and stop after this step, with exit code 75; 0: go on to train_steps."""
    exit_after_seconds: float = 0.0
    """Save and stop at the end of the step in which so much time has passed, with exit code 75; 0: never."""
    max_bad_steps: int = 10
    """Steps in a row whose gradients are not finite (in fp16: with the loss scale at its floor) that end the run."""
    find_nan: bool = False
    """Look for the first layer whose output is not finite; slow, for debugging."""
    spike_sigmas: float = 0.0
    """Warn of a loss so many standard deviations above its recent course; 0: never."""
    spike_window: int = 100
    """Steps of that course."""
    stop_on_spike: bool = False
    """End the run at a spike, without saving it."""
    seed: int = 1234
    """Seed of initial values, sample order and dropout."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step and data-parallel rank (of a resolved config)."""
        return self.batch.global_batch_size // (self.batch.micro_batch_size * self.parallel.dp)
