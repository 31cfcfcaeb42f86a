"""The loss of the indexers of sparse attention, which classes of transformers leave untrained."""
import torch


class IndexerLosses:
    """The divergence of every indexer's distribution from that of its layer's heads, over the keys that were picked. The
    classes leave indexers untrained, so that it is computed beside them, from what each attention was given."""

    def __init__(self, model):
        self.values, self.hooks = [], []
        self.neighbours = type(model).__name__ == "GlmMoeDsaForCausalLM"  # pairs of columns that turn together
        for module in model.modules():
            if getattr(module, "indexer", None) is not None:
                self.hooks.append(module.register_forward_hook(self.add, with_kwargs=True))

    def turned(self, x, angles):
        cos, sin = (part[:, :, None, :part.shape[-1] // 2] for part in angles)
        width = 2 * cos.shape[-1]
        first, second = (x[..., 0:width:2], x[..., 1:width:2]) if self.neighbours else x[..., :width].chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., width:]], dim=-1)

    def add(self, attention, given, named, result):
        indexer, x = attention.indexer, (named["hidden_states"] if "hidden_states" in named else given[0]).detach()
        latent = attention.q_a_layernorm(attention.q_a_proj(x)).detach()
        angles = named["position_embeddings"]
        q = self.turned(indexer.wq_b(latent).unflatten(-1, (indexer.n_heads, indexer.head_dim)), angles)
        k = self.turned(indexer.k_norm(indexer.wk(x))[:, :, None], angles)[:, :, 0]
        products = torch.einsum("bshd,btd->bsht", q, k).relu() * indexer.head_dim ** -0.5
        scores = torch.einsum("bsht,bsh->bst", products, indexer.weights_proj(x) * indexer.n_heads ** -0.5)
        heads = result[1].detach().mean(dim=1)
        picked = heads > 0
        logs = scores.masked_fill(~picked, float("-inf")).log_softmax(dim=-1)
        terms = heads * (heads.clamp_min(1e-30).log() - logs.masked_fill(~picked, 0.0))
        self.values.append(terms.sum(dim=-1).mean())

    def sum(self):
        for hook in self.hooks:
            hook.remove()
        return sum(self.values)
