"""Which family of architectures a model belongs to, as the corpus names families."""

from __future__ import annotations

import functools
import re

# The first that matches a model's type or class name, in lower case without punctuation.
_FAMILIES = (
    (r"deberta", "deberta"),
    (r"distilbert|mobilebert|tinybert|minilm", "distilbert/mobilebert (small bert)"),
    (r"albert", "albert"),
    (r"longformer|bigbird|reformer|led\b", "longformer/bigbird (sparse attn)"),
    (r"mt5|t5|switchtransformer", "t5"),
    (r"bart|marian|pegasus|m2m|blenderbot|trocr|speech2text|opennmt|prophetnet",
     "bart/marian/pegasus (enc-dec)"),
    (r"whisper|wav2vec|hubert|conformer|rnn|lstm|gru|tacotron|demucs|audio", "rnn/audio"),
    (r"bert|electra|layoutlm|fnet|xlnet|mpnet|xlm|ernie", "bert-like encoder"),
    (r"llama|qwen|mistral|gemma|phi|olmo|falcon|smollm|mixtral|deepseek", "llama-like decoder"),
    (r"gpt|opt\b|optfor|xglm|bloom|codegen|mpt", "gpt-like decoder"),
    (r"swin|pvt|coat|maxvit|mobilevit|poolformer|hiera|mvit|volo|twins", "swin/hierarchical vit"),
    (r"convnext", "convnext-like"),
    (r"vit|deit|beit|clip|dino|eva02|siglip", "vit/deit/beit"),
    (r"mixer|mlp_?mixer|gmlp|resmlp", "mlp-mixer like"),
    (r"mobilenet|efficientnet|mnasnet|squeezenet|ghostnet|shufflenet|fbnet|lcnet|regnetx002",
     "mobile cnn (depthwise)"),
    (r"unet2dcondition|dit\b|flux|stablediffusion|diffusion|pixart", "diffusion"),
    (r"gan|cyclegan|pix2pix", "gan/image-gen (non-diffusion)"),
    (r"yolo|detr|rcnn|retinanet|unet|segment|deeplab|fcn|ssd", "detection/segmentation"),
    (r"resnet|resnext|regnet|densenet|vgg|inception|nfnet|darknet|dla|dpn|hrnet|wideresnet|resnest",
     "resnet-like cnn"),
    (r"gcn|gat|gin|sage|graph|gnn|schnet", "gnn"),
    (r"actor|critic|policy|dqn|ppo|sac\b|dlrm|recommender", "rl / small mlp"),
)  # fmt: skip
FAMILIES = tuple(dict.fromkeys(name for _, name in _FAMILIES))


@functools.lru_cache(maxsize=1024)
def family_of(name: str) -> str:
    """Returns the corpus's family of a model's type or class name; empty when none is known."""
    key = re.sub(r"[^a-z0-9_]", "", name.lower())
    if name.lower() in FAMILIES:
        return name.lower()
    for pattern, family in _FAMILIES:
        if re.search(pattern, key):
            return family
    return ""
