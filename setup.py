"""Package description of megatron3d; tool settings are in pyproject.toml."""

from setuptools import setup

EXTRAS = {
    "gpu": ["triton>=3.3"],
    "wandb": ["wandb"],
    "tensorboard": ["tensorboard"],
    "hf": ["transformers", "tokenizers"],
    "dev": ["pytest>=8", "pytest-xdist", "hypothesis", "ruff", "mypy", "wandb", "tensorboard", "transformers"],
}

setup(
    name="megatron3d",
    version="0.1.0",
    description="Pre-training of GPT-style decoders on a DP x TP x PP mesh, on GPUs and on CPUs",
    python_requires=">=3.11",
    # The import name `kernels` belongs to another project, so the folder kernels/ is installed below our own name; the
    # links megatron3d/kernels and megatron3d/model_configs make a bare checkout look the same.
    packages=["megatron3d", "megatron3d.kernels", "megatron3d.model_configs"],
    package_dir={
        "megatron3d": "megatron3d",
        "megatron3d.kernels": "kernels",
        "megatron3d.model_configs": "model_configs",
    },
    package_data={"megatron3d": ["py.typed"], "megatron3d.model_configs": ["*.toml"]},
    install_requires=[
        "torch>=2.11",
        "numpy>=1.26",
        "sentencepiece>=0.2",
        "safetensors>=0.4",
        "isal>=1.7; platform_machine in 'x86_64 AMD64 aarch64 arm64'",
        "tyro>=1.0",
        "rich>=13",
    ],
    extras_require=EXTRAS,
)
