"""OpenAI's endpoints, for models with the contract of `gateway.openai_contract`, and encoders.

Read in this order: `routes` (paths, list of models, state of the server), `answers` (whole answers,
streams, errors), `request` (body, id, look-up of the model), `embeddings` (models without the
contract, by `gateway.text_encoder`).
"""
