{{/*
Values of a component's pod: those of all pods, overridden by the component's own: (dict "root" $ "component" name).
The result is YAML.
*/}}
{{- define "gammaray.podValues" -}}
{{- $all := .root.Values -}}
{{- $nested := dict "redis-password" $all.redis.passwordJob "jaeger" $all.telemetry.jaeger "collector" $all.telemetry.collector "models" $all.modelCache.download "test" $all.helmTest -}}
{{- $own := get $nested .component | default (get $all .component) -}}
{{- mergeOverwrite (deepCopy $all.pods) (deepCopy $own) | toYaml -}}
{{- end -}}

{{/* Labels and annotations of a pod: (dict "root" $ "component" name), optional "labels" and "annotations" of the chart. */}}
{{- define "gammaray.podMetadata" -}}
{{- $values := include "gammaray.podValues" . | fromYaml -}}
{{- $selector := include "gammaray.selector" . | fromYaml -}}
labels: {{- merge $selector (.labels | default dict) ($values.labels | default dict) (omit .root.Values.commonLabels "app.kubernetes.io/name") | toYaml | nindent 2 }}
{{- with merge (.annotations | default dict) ($values.annotations | default dict) }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/*
Fields of the spec of every pod: (dict "root" $ "component" name "user" id), optional "account" (service account),
"token" (whether to mount its token) and "gpus" (number).
*/}}
{{- define "gammaray.podSpec" -}}
{{- $all := .root.Values -}}
{{- $values := include "gammaray.podValues" . | fromYaml -}}
serviceAccountName: {{ .account | default (include "gammaray.serviceAccountName" .root) | quote }}
automountServiceAccountToken: {{ .token | default false }}
enableServiceLinks: false
{{- with $values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $values.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with $all.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- $selector := $values.nodeSelector | default dict }}
{{- with $values.acceleratorType }}
{{- $selector = merge (dict $all.acceleratorLabel .) $selector }}
{{- end }}
{{- with $selector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- $tolerations := $values.tolerations | default list }}
{{- if .gpus }}
{{- $tolerations = concat $tolerations $all.gpuTolerations | uniq }}
{{- end }}
{{- with $tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext: {{- include "gammaray.podSecurity" (dict "values" $values "user" .user) | nindent 2 }}
{{- end -}}

{{/* Fields of the first container of every pod: (dict "root" $ "component" name "image" reference), optional "gpus". */}}
{{- define "gammaray.container" -}}
{{- $values := include "gammaray.podValues" . | fromYaml -}}
image: {{ .image | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy | quote }}
securityContext: {{- include "gammaray.containerSecurity" $values | nindent 2 }}
resources: {{- include "gammaray.resources" (dict "root" .root "values" $values "gpus" .gpus) | nindent 2 }}
{{- end -}}

{{/* Environment of a container: the chart's "own" entries (YAML), and those in the "values" of its pod, which replace them. */}}
{{- define "gammaray.env" -}}
{{- $given := .values.env | default list -}}
{{- $names := list -}}
{{- range $given -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- $entries := list -}}
{{- range .own | fromYamlArray -}}
{{- if not (has .name $names) -}}
{{- $entries = append $entries . -}}
{{- end -}}
{{- end -}}
{{- concat $entries $given | toYaml -}}
{{- end -}}

{{/* Requests and limits, GPUs included: (dict "root" $ "values" pod values "gpus" number or nil). */}}
{{- define "gammaray.resources" -}}
{{- $resources := deepCopy .values.resources -}}
{{- if .gpus -}}
{{- $name := .values.gpuResource | default .root.Values.gpuResource -}}
{{- $count := toString .gpus -}}
{{- range $kind := list "limits" "requests" -}}
{{- $_ := set $resources $kind (set (get $resources $kind | default dict) $name $count) -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
