#!/usr/bin/env bash
# A fine-tune: a folder of Hugging Face learns conversations with LoRA, then preferences by DPO; it answers, and goes to other programs.
source "$(dirname "${BASH_SOURCE[0]}")/day.sh"

# A reader has the folder from a hub. Here it is a small one with a tokenizer of bytes.
python3 - "$ROOT" <<'PYTHON'
import json, sys
from pathlib import Path

sys.path.append(sys.argv[1])
from tests.unit import chat_folders

chat_folders.write(Path("tokenizer"))
Path("text.txt").write_text("Who are you? A model. What is 2 + 2? It is 4.\n" * 200)
talks = [[{"role": "user", "content": f"What is {n} + 1?"}, {"role": "assistant", "content": f"It is {n + 1}."}] for n in range(64)]
Path("conversations.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
wrong = [{"role": "assistant", "content": "No."}]
Path("pairs.jsonl").write_text(
    "".join(json.dumps({"prompt": talk[:1], "chosen": talk[1:], "rejected": wrong}) + "\n" for talk in talks)
)
PYTHON
cat > base.yaml <<'YAML'
model: {vocab_size: 264, width: 32, num_layers: 2, num_heads: 2, num_kv_heads: 2, mlp_width: 64}
data: {paths: [text.txt], tokenizer: tokenizer, sequence_length: 64, eval_fraction: 0.1}
global_batch_size: 8
max_num_steps: 20
YAML
# docs/faq.md: gangway train quickstart.yaml
shows 'step 20/20' gangway train base.yaml
# docs/start.md: gangway export runs/quickstart model --format huggingface
shows 'models/small' gangway export runs/base models/small --format huggingface
ls models/small/config.json models/small/chat_template.jinja

cat > chat.yaml <<YAML
model: {pretrained: models/small}
lora: {rank: 4, alpha: 8}
data: {paths: [conversations.jsonl], packing: fit, sequence_length: 128}
global_batch_size: 4
max_num_steps: $STEPS
publish_every_steps: 5
optimizer: {learning_rate: 1.0e-2}
YAML
# docs/how_to.md: gangway data config.yaml
shows 'It is' gangway data chat.yaml
# docs/start.md: gangway run config.yaml
shows 'chat finished' gangway run chat.yaml
# docs/models.md: gangway generate RUN --prompt
shows 'It is' gangway generate runs/chat --chat --prompt 'What is 3 + 1?' --max-new-tokens 12
# docs/how_to.md: gangway export runs/config exported --format huggingface
shows 'exported' gangway export runs/chat exported --format huggingface
# docs/commands.md: --adapter
shows 'adapter' gangway export runs/chat adapter --format huggingface --adapter
ls exported/config.json exported/model.safetensors adapter/adapter_config.json adapter/adapter_model.safetensors

cat > dpo.yaml <<YAML
task: trainers.tasks.preference:PreferenceTask
model: {pretrained: exported}
frozen: {reference: exported}
preference: {loss: dpo, beta: 0.1}
data: {paths: [pairs.jsonl], sequence_length: 64}
global_batch_size: 8
max_num_steps: $STEPS
publish_every_steps: 5
YAML
# docs/commands.md: gangway train config.yaml
shows 'rewards/margin' gangway train dpo.yaml
# docs/start.md: gangway export runs/quickstart model --format huggingface
shows 'preferred' gangway export runs/dpo preferred --format huggingface
# docs/models.md: gangway generate exported --chat --prompt
shows 'It is' gangway generate preferred --chat --prompt 'What is 3 + 1?' --max-new-tokens 12
