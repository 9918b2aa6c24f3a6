//! A controller: begins steps, claims shards and ends steps over a kept connection.

use std::sync::Arc;

use serde_json::{Value, json};
use tundish_store::http::WorkerClient;
use tundish_store::{Claimed, KeptCounts, ShardId, StepStats, StoreError, TimeLimit};

/// A connection to a process that the claims made on it live as long as.
pub struct Controller {
    client: WorkerClient,
    owner: Arc<str>,
}

impl Controller {
    pub fn new(owner: &Arc<str>) -> Self {
        Controller { client: WorkerClient::new(owner, None, None), owner: Arc::clone(owner) }
    }

    pub fn connection_number(&self) -> Option<u64> {
        self.client.connection_number()
    }

    fn post(&self, path: &str, content: Option<Value>, time_limit: &mut TimeLimit<'_>) -> Result<Value, StoreError> {
        let body = content.map_or_else(Vec::new, |content| content.to_string().into_bytes());
        let (status, answer) = self.client.request("POST", path, &body, time_limit)?;
        let answer: Value = serde_json::from_slice(&answer).unwrap();
        if let Some(step) = answer["ended_step"].as_u64() {
            return Err(StoreError::StepEnded { step: step.into() });
        }
        if let Some(step) = answer["taken_step"].as_u64() {
            return Err(StoreError::StepTaken { step: step.into() });
        }
        if status == 200 {
            return Ok(answer);
        }
        let reason = answer["message"].to_string();
        Err(StoreError::Refused { owner: Arc::clone(&self.owner), status, reason })
    }

    pub fn begin_step(&mut self, step: u64, time_limit: &mut TimeLimit<'_>) -> Result<(), StoreError> {
        self.post(&format!("/step/{step}/begin"), None, time_limit).map(drop)
    }

    pub fn claim(&mut self, step: u64, ids: &[ShardId], time_limit: &mut TimeLimit<'_>) -> Result<Claimed, StoreError> {
        let answer = self.post(&format!("/step/{step}/claim"), Some(json!({"shard_ids": ids})), time_limit)?;
        let ids = |name: &str| serde_json::from_value(answer[name].clone()).unwrap();
        Ok(Claimed {
            claimed_count: answer["claimed_count"].as_u64().unwrap(),
            total_bytes: answer["total_bytes"].as_u64().unwrap(),
            missing: ids("missing_shard_ids"),
            taken: ids("taken_shard_ids"),
            kept: ids("kept_shard_ids"),
        })
    }

    pub fn keep(&mut self, ids: &[ShardId], time_limit: &mut TimeLimit<'_>) -> Result<KeptCounts, StoreError> {
        let answer = self.post("/keep", Some(json!({"shard_ids": ids})), time_limit)?;
        let count = |name: &str| answer[name].as_u64().unwrap();
        Ok(KeptCounts { shards: count("kept_shards"), entries: count("kept_count") })
    }

    pub fn end_step(&mut self, step: u64, time_limit: &mut TimeLimit<'_>) -> Result<StepStats, StoreError> {
        let answer = self.post(&format!("/step/{step}/end"), None, time_limit)?;
        Ok(serde_json::from_value(answer).unwrap())
    }
}
