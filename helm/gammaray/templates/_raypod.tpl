{{/* Ports that Ray binds; they are fixed, so that network policies can name them. */}}
{{- define "gammaray.rayStartParams" -}}
node-manager-port: "6380"
object-manager-port: "6381"
runtime-env-agent-port: "6382"
dashboard-agent-grpc-port: "6383"
dashboard-agent-listen-port: "52365"
metrics-export-port: "8080"
min-worker-port: "10002"
max-worker-port: "19999"
{{- end -}}

{{/* A Ray pod: (dict "root" $ "component" name "image" image "gpus" number "ports" list "readiness" probe). */}}
{{- define "gammaray.rayPod" -}}
{{- include "gammaray.patchedPod" (dict "root" .root "component" .component "pod" (include "gammaray.ownRayPod" .)) -}}
{{- end -}}

{{- define "gammaray.ownRayPod" -}}
{{- $values := include "gammaray.podValues" . | fromYaml -}}
{{- $root := .root -}}
{{- /* Only Ray's autoscaler, a container in the head's pod, calls the Kubernetes API. */ -}}
{{- $token := and (eq .component "head") (include "gammaray.scales" $root | eq "true") -}}
{{- $image := include "gammaray.image" (dict "root" $root "name" .image) -}}
{{- $pod := dict "root" $root "component" .component "user" 1000 "token" $token "image" $image "gpus" .gpus "labels" (dict "gammaray.io/ray" "true") -}}
metadata: {{- include "gammaray.podMetadata" $pod | nindent 2 }}
spec:
  {{- include "gammaray.podSpec" $pod | nindent 2 }}
  terminationGracePeriodSeconds: {{ $values.terminationGracePeriodSeconds | int64 }}
  {{- if and $values.topologySpread.enabled (ne .component "head") }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: {{ $values.topologySpread.topologyKey | quote }}
      whenUnsatisfiable: {{ $values.topologySpread.whenUnsatisfiable | quote }}
      labelSelector:
        matchLabels: {{- include "gammaray.selector" . | nindent 10 }}
  {{- end }}
  {{- with $values.initContainers }}
  initContainers: {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: ray-{{ .component }}
      {{- include "gammaray.container" $pod | nindent 6 }}
      env: {{- include "gammaray.env" (dict "own" (include "gammaray.rayEnv" (dict "root" $root "component" .component "values" $values)) "values" $values) | nindent 8 }}
      ports:
        - {name: metrics, containerPort: 8080}
        {{- range $name, $port := .ports }}
        - {name: {{ $name }}, containerPort: {{ $port }}}
        {{- end }}
      startupProbe:
        httpGet: {path: /api/local_raylet_healthz, port: 52365}
        {{- toYaml $values.probes.startup | nindent 8 }}
      livenessProbe:
        {{- if eq .component "head" }}
        {{- include "gammaray.headAlive" . | nindent 8 }}
        {{- else }}
        httpGet: {path: /api/local_raylet_healthz, port: 52365}
        {{- end }}
        {{- toYaml $values.probes.liveness | nindent 8 }}
      readinessProbe:
        {{- toYaml .readiness | nindent 8 }}
        {{- toYaml $values.probes.readiness | nindent 8 }}
      volumeMounts: {{- include "gammaray.volumeMounts" (dict "root" $root "component" .component "values" $values) | nindent 8 }}
    {{- with $values.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes: {{- include "gammaray.volumes" (dict "root" $root "component" .component "values" $values) | nindent 4 }}
{{- end -}}

{{/* Liveness of the head: checks the Ray node and the control service (GCS), where an httpGet probe checks only one. */}}
{{- define "gammaray.headAlive" -}}
exec:
  command:
    - python
    - -c
    - {{ .root.Files.Get "files/is_alive.py" | quote }}
    - http://127.0.0.1:52365/api/local_raylet_healthz
    - http://127.0.0.1:8265/api/gcs_healthz
{{- end -}}

{{/*
`minAvailable` of a role's disruption budget: (dict "root" $ "component" name). A RayCluster has no scale subresource,
so with `maxUnavailable` or a percentage Kubernetes would reject every eviction and no node could be drained.
*/}}
{{- define "gammaray.minAvailable" -}}
{{- $values := include "gammaray.podValues" . | fromYaml -}}
{{- $least := $values.replicas | default $values.workers | toString | splitList ":" | first | int -}}
{{- max 0 (sub $least (int $values.disruptionBudget.maxUnavailable)) -}}
{{- end -}}
