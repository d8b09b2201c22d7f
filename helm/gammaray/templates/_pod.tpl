{{/*
Values of one role, merged over those of all pods: (dict "root" $ "component" name). The result is YAML.
*/}}
{{- define "gammaray.podValues" -}}
{{- mergeOverwrite (deepCopy .root.Values.pods) (deepCopy (get .root.Values .component)) | toYaml -}}
{{- end -}}

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
{{- define "gammaray.pod" -}}
{{- $values := include "gammaray.podValues" . | fromYaml -}}
{{- $root := .root -}}
metadata:
  labels:
    {{- include "gammaray.selector" . | nindent 4 }}
    gammaray.io/ray: "true"
    {{- with $values.labels }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- with $values.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "gammaray.serviceAccountName" $root }}
  # Only Ray's autoscaler, a container in the head's pod, calls the Kubernetes API.
  automountServiceAccountToken: {{ and (eq .component "head") (include "gammaray.scales" $root | eq "true") }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ $values.terminationGracePeriodSeconds }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- $selector := $values.nodeSelector | default dict -}}
  {{- with $values.acceleratorType }}
  {{- $selector = merge (dict $root.Values.acceleratorLabel .) $selector }}
  {{- end }}
  {{- with $selector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if and $values.topologySpread.enabled (ne .component "head") }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: {{ $values.topologySpread.topologyKey }}
      whenUnsatisfiable: {{ $values.topologySpread.whenUnsatisfiable }}
      labelSelector:
        matchLabels: {{- include "gammaray.selector" . | nindent 10 }}
  {{- end }}
  securityContext: {{- include "gammaray.podSecurity" 1000 | nindent 4 }}
  {{- $waits := and (include "gammaray.downloads" $root) (ne .component "head") }}
  {{- if or $waits $values.initContainers }}
  initContainers:
    {{- if $waits }}
    {{- include "gammaray.waitForModels" . | nindent 4 }}
    {{- end }}
    {{- with $values.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    - name: ray-{{ .component }}
      image: {{ include "gammaray.image" (dict "root" $root "name" .image) }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      securityContext: {{- include "gammaray.containerSecurity" . | nindent 8 }}
      env: {{- include "gammaray.env" (dict "root" $root "component" .component "values" $values) | nindent 8 }}
      ports:
        - {name: metrics, containerPort: 8080}
        {{- range $name, $port := .ports }}
        - {name: {{ $name }}, containerPort: {{ $port }}}
        {{- end }}
      resources: {{- include "gammaray.resources" (dict "root" $root "resources" $values.resources "gpus" .gpus) | nindent 8 }}
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

{{/* Requests and limits, GPUs included. */}}
{{- define "gammaray.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- if .gpus -}}
{{- $count := toString .gpus -}}
{{- range $kind := list "limits" "requests" -}}
{{- $_ := set $resources $kind (set (get $resources $kind | default dict) $.root.Values.gpuResource $count) -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
