// Families that are known by name and not read. Source: the modeling files of transformers 5.24, and of the published
// code.
#include "planner/model/families/lacking.hpp"

#include <array>
#include <cctype>
#include <string_view>

namespace moe::families {
namespace {

struct Lack {
    const char* part;
    const char* names; // in small letters and without marks, each between blanks; "*": all that begin so
};

constexpr std::array lacks{
    Lack{"hybrid Mamba layers", " zamba zamba2 "},
    Lack{"layers of Mamba-2 alone", " mamba2 "},
    Lack{"hybrid linear attention layers", " olmohybrid "},
    Lack{"hybrid convolution layers", " lfm2vl lfm3 inkling* zaya "},
    Lack{"recurrent layers", " recurrentgemma rwkv xlstm "},
    Lack{"learned, sinusoidal or relative positions",
         " bart bert bertgeneration bigbird bigbirdpegasus biogpt "
         "blenderbot blenderbotsmall bloom camembert cpmant ctrl "
         "data2vectext electra ernie git gpt2 gptsw3 gptbigcode gptneo "
         "marian mbart megatronbert mpt musicgen musicgenmelody "
         "mvp openaigpt opt pegasus plbart prophetnet reformer reformermodelwith rembert "
         "roberta robertaprelayernorm rocbert roformer trocr "
         "whisper xglm xlm xlmroberta xlmrobertaxl xlmwith xlnet xmod "},
    Lack{"layers with attention and MLP side by side",
         " codegen coherecompass* falcon gptj gptneox gptneoxjapanese persimmon phi "},
    Lack{"LayerNorm around gated or rotated layers", " fuyu jais2 modernbertdecoder olmo stablelm starcoder2 "},
    Lack{"norms behind attention and MLP", " vaultgemma "},
    Lack{"scaled embeddings", " gemma moshi "},
    Lack{"factors on embeddings, scores and sums", " graniteswa hyperclovax minicpm3 "},
    Lack{"activations or gates of their own kind", " apertus1p5* bitnet nanochat "},
    Lack{"embeddings or cross-attention of other layers", " gemma3n* gemma4assistant gemma4unified* mllama "},
    Lack{"hierarchies or loops of models", " blt hrmtext "},
    Lack{"attention of experts", " diffllama doge dory "},
    Lack{"embeddings of n-grams", " longcatflashngram* flashlocal* qwen4exp* "},
    Lack{"windows of latent attention with sizes of their own", " dots3note* "},
    Lack{"dense decoders of this family",
         " emu3 exaone gotocr2 helium internlm3 iquestcoder mosstranscribediarize phi4multimodal "},
};

// "jamba" of "JambaForCausalLM": small letters and digits before what every class name ends with.
std::string plain(const std::string& written) {
    std::string name;
    for (const char* end : {"ForC", "LMHead", "Decoder", "ModelWith"})
        if (const std::size_t at = written.rfind(end); at != std::string::npos && at > 0 && name.empty())
            name = written.substr(0, at);
    std::string letters;
    for (const char c : name.empty() ? written : name)
        if (std::isalnum(static_cast<unsigned char>(c)) != 0)
            letters += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return letters;
}

bool holds(std::string_view names, const std::string& name) {
    if (names.find(" " + name + " ") != std::string_view::npos) return true;
    for (std::size_t star = names.find('*'); star != std::string_view::npos; star = names.find('*', star + 1)) {
        const std::size_t begin = names.rfind(' ', star) + 1;
        if (name.starts_with(names.substr(begin, star - begin))) return true;
    }
    return false;
}

} // namespace

std::string lacking_part(const std::string& written) {
    const std::string name = plain(written);
    for (const Lack& lack : lacks)
        if (!name.empty() && holds(lack.names, name)) return lack.part;
    return {};
}

} // namespace moe::families
