"""Makes what a Wan pipeline needs besides its transformer, tiny and without a download.

    python examples/prepare_wan.py

writes tokenizer, text encoder, VAE and scheduler into runs/wan/components, as a WanPipeline without transformer. With
the real Wan you would load these from its repository instead. Nothing here is trained:

- The text encoder has random weights. That is enough to tell the prompts apart.
- The VAE's weights are computed: it is a principal component analysis (PCA) of the clips' patches of 8 x 8 pixels.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from clips import PROMPTS, Clips
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline
from diffusers.models.autoencoders.autoencoder_kl_wan import patchify
from diffusers.utils import logging
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel
from transformers.utils import logging as transformers_logging

PATCH = 8  # pixels of a side
CHANNELS = 8  # of a latent: this many principal components of a patch's 3 * PATCH**2 values
WIDTH = 2 * CHANNELS + 16  # channels inside the VAE


def load_components(directory: Path) -> WanPipeline:
    """The pipeline in `directory`/components, frozen, without a transformer. Raises SystemExit if there is none."""
    path = directory / "components"
    if not (path / "model_index.json").exists():
        raise SystemExit(f"there is no pipeline in {path}: run python examples/prepare_wan.py --directory {directory}")
    logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    pipeline = WanPipeline.from_pretrained(path, transformer=None)
    for module in (pipeline.text_encoder, pipeline.vae):
        module.requires_grad_(False).eval()
    return pipeline


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word of the prompts, and one at the end."""
    words = sorted({word for prompt in PROMPTS for word in prompt.replace(",", " ,").split()})
    vocabulary = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=11
    )


def build_text_encoder(vocabulary: int) -> UMT5EncoderModel:
    """A small UMT5 with random weights."""
    torch.manual_seed(0)
    config = UMT5Config(vocab_size=vocabulary, d_model=32, d_kv=8, num_heads=4, d_ff=64, num_layers=2)
    return UMT5EncoderModel(config).eval()


def build_vae(pixels: Tensor) -> AutoencoderKLWan:
    """A Wan VAE whose latents are the principal components of the patches of `pixels` [B, 3, F, H, W].

    They are scaled by one number, so that their variance is 1 on average, and most of it is in the first ones.
    The network is made linear. Its residual blocks add nothing. Its norms divide by nearly a constant, since one
    channel is large. And the activation between norm and last layer has no effect on a difference: each value goes
    through it twice, as x and -x, and silu(x) - silu(-x) = x.
    """
    patches = patchify(pixels, PATCH).movedim(1, -1).flatten(0, -2)  # [patches, values]
    mean = patches.mean(0)
    _, scales, components = torch.linalg.svd(patches - mean, full_matrices=False)
    deviation = (scales[:CHANNELS] ** 2).mean().sqrt() / len(patches) ** 0.5
    to_latents = components[:CHANNELS] / deviation
    to_patches = (components[:CHANNELS] * deviation).T

    vae = AutoencoderKLWan(
        base_dim=WIDTH,
        z_dim=CHANNELS,
        dim_mult=[1],  # one level, so the only compression is that of the patches
        num_res_blocks=1,
        temperal_downsample=[],
        latents_mean=[0.0] * CHANNELS,
        latents_std=[1.0] * CHANNELS,
        in_channels=3 * PATCH**2,
        out_channels=3 * PATCH**2,
        patch_size=PATCH,
        scale_factor_temporal=1,
        scale_factor_spatial=PATCH,
    ).eval()
    for name, module in vae.named_modules():
        if name.endswith(("conv2", "proj")):  # the last layer of a residual block
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    constant = 1000.0
    gain = constant / WIDTH**0.5  # what the norms divide by
    both, zeros, one = torch.eye(CHANNELS), torch.zeros(CHANNELS), torch.full((1,), constant)
    twice = torch.cat([both, -both])
    set_pointwise(vae.encoder.conv_in, twice @ to_latents, torch.cat([twice @ to_latents @ -mean, one]))
    set_pointwise(vae.encoder.conv_out, gain * twice.T, torch.cat([zeros, zeros - 30]))  # means, log-variances
    set_pointwise(vae.quant_conv, torch.eye(2 * CHANNELS), torch.zeros(2 * CHANNELS))
    set_pointwise(vae.post_quant_conv, both, zeros)
    set_pointwise(vae.decoder.conv_in, twice, torch.cat([zeros, zeros, one]))
    set_pointwise(vae.decoder.conv_out, gain * to_patches @ twice.T, mean)
    return vae


@torch.no_grad()
def set_pointwise(layer: nn.Conv3d, weight: Tensor, bias: Tensor) -> None:
    """Make a causal convolution apply `weight` [out, in] and `bias` to each place alone; further channels are 0."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    _, _, _, height, width = layer.weight.shape
    layer.weight[: len(weight), : weight.shape[1], -1, height // 2, width // 2] = weight  # -1: the frame itself
    layer.bias[: len(bias)] = bias


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, default=Path("runs/wan"), help="of the run (default: %(default)s)")
    options = parser.parse_args()
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    clips = Clips(latent_shape=())
    pixels = torch.stack([clips[index]["pixels"] for index in range(len(clips))])
    tokenizer = build_tokenizer()
    pipeline = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=build_text_encoder(len(tokenizer)),
        vae=build_vae(pixels),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=None,  # train_wan.py makes it
    )
    pipeline.save_pretrained(options.directory / "components")
    latents = pipeline.vae.encode(pixels).latent_dist.mode()
    error = (pipeline.vae.decode(latents).sample - pixels).abs().mean() / 2
    print(f"wrote {options.directory / 'components'}; the VAE's mean error is {error:.1%} of the range")


if __name__ == "__main__":
    main()
