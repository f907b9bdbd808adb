"""OpenAI's endpoints, for models with the contract of `gateway.openai_contract`, and encoders.

Read in this order: `routes` (paths), `answers` (whole answers, streams, errors), `request` (body
and id), `models` (look-up and list), `errors` (error objects), `embeddings` (models without the
contract), `encoders` (the tensors of such models).
"""
